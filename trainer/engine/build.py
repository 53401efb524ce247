"""The model to train: what the task builds, after the run's converters, in the number format that
its optimizer updates."""

from __future__ import annotations

import torch
from torch import nn

from trainer.capability import BFLOAT16, check_capability
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.models.converter import CheckedConverter
from trainer.models.family import HUGGING_FACE, ModelFamily
from trainer.models.init import WeightSource
from trainer.optimizer import master_dtype
from trainer.parallel.check import check_converted
from trainer.tasks.task import PreparedTask


def build_model(
    task: PreparedTask, train: TrainConfig, device: torch.device | None = None
) -> tuple[nn.Module, WeightSource]:
    """The converted model with its parameters on the meta device, and where their values come from.
    The driver and all workers call it with the same task and settings.

    Args:
        task: what is learned.
        train: the settings of the run.
        device: the worker's; None on the driver.

    Raises:
        ConfigError: the converters leave nothing to train, or nothing that tensor ranks can share,
            or do not go with the run, a parameter has no dimension, there are no blocks to
            recompute or to compile, or too few to offload, or the worker's GPU does not compute in
            that precision.
    """
    if device is not None and train.precision == "bfloat16":
        check_capability(
            device,
            BFLOAT16,
            field="train.precision",
            value=train.precision,
            what="bfloat16",
            fix="Use 'float32', or leave these machines out",
        )
    model, source = task.build(train.seed)
    for converter in train.converters:
        model, source = converter.convert(model, source)
    for converter in train.converters:
        if isinstance(converter, CheckedConverter):
            converter.check(model, train, device)
    if train.converters and train.parallel.tensor > 1:
        check_converted(train.converters, model, family_of_task(task))
    if train.converters and not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(
            "train.converters",
            train.converters,
            "they leave no trainable parameters",
            "Keep some trainable",
        )
    for name, param in model.named_parameters():
        if param.dim() == 0:
            raise ConfigError(
                "train.task",
                f"parameter {name}",
                "it has no dimension, and parameters are sharded along their first",
                "Give it one: a tensor of shape (1,)",
            )
    dtype = getattr(torch, master_dtype(train.optimizer))
    if dtype != torch.float32:
        _cast(model, dtype)
    asked = [
        ("train.recompute", train.recompute, None),
        ("train.compile", train.compile, "off"),
    ]
    for field, value, off in asked:
        if value != off and not family_of_task(task).blocks(model):
            raise ConfigError(
                field, value, "the model has no ModuleList of repeated blocks", f"Use {off!r}"
            )
    offload, count = train.offload, len(family_of_task(task).blocks(model))
    if offload is not None and count <= offload.horizon:
        raise ConfigError(
            "train.offload.horizon",
            offload.horizon,
            f"the model has {count} repeated blocks, and the last {offload.horizon} stay on the "
            "device: nothing would be offloaded",
            f"Use {count - 1} or less" if count > 1 else "Use offload=None",
        )
    return model, source


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives parameters on meta another number format, those that are not trained, too: FSDP2 wants
    one in a group. Tied ones stay tied, and buffers what they are."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.is_floating_point():
                made = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
                module.register_parameter(name, cast.setdefault(id(param), made))


def family_of_task(task: PreparedTask) -> ModelFamily:
    """What must be known of the task's architecture."""
    family: ModelFamily = getattr(task, "family", HUGGING_FACE)
    return family
