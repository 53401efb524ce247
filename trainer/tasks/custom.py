"""`CustomTask`: any `nn.Module` with its own loss and dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from checkpointing.field_types import type_name
from trainer.config import TrainConfig
from trainer.errors import ConfigError, check_types
from trainer.tasks.trial import try_loss

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.data import SampleSource
    from trainer.models.init import WeightSource


@dataclass(frozen=True, kw_only=True)
class CustomTask:
    """Any `nn.Module` with its own loss and dataset. Implements Task and PreparedTask.

    The functions and datasets cross to the workers by Ray's serialisation.
    """

    build_model: Callable[[], nn.Module]
    """Makes the whole model on the CPU; it is called with torch's generator seeded by `train.seed`,
    on every worker, so it must draw its random numbers from torch alone."""
    loss_function: Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
    """(model, batch) -> (sum of the losses, number of terms in the sum). The gradient is divided by
    the global number of terms; it is a whole number."""
    dataset: Any
    """Samples to learn from: `__len__` and `__getitem__`, collated as `torch.utils.data` does."""
    eval_dataset: Any = None
    """Held-out samples of the same kind."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the run's records, JSON values."""
    flops_per_term: float | None = None
    """Floating-point operations for one term of the loss, forward and backward; None: 6 for each
    parameter, which is right where each multiplies once for each term."""

    def __post_init__(self) -> None:
        check_types(self, "train.task")
        for name in ("build_model", "loss_function"):
            value = getattr(self, name)
            if not callable(value):
                raise ConfigError(
                    f"train.task.{name}", value, "it cannot be called", "Give a function"
                )
        _check_map_style("train.task.dataset", self.dataset)
        if self.eval_dataset is not None:
            _check_map_style("train.task.eval_dataset", self.eval_dataset)
        if self.flops_per_term is not None and not self.flops_per_term > 0:
            raise ConfigError(
                "train.task.flops_per_term",
                self.flops_per_term,
                "no operations",
                "Use a positive number, or None",
            )
        # A model can be called too. Its class can make one; this must not import torch.
        if hasattr(self.build_model, "named_parameters") and not isinstance(self.build_model, type):
            raise ConfigError(
                "train.task.build_model",
                type(self.build_model).__name__,
                "it is a model, not a function that makes one: every worker makes its own",
                "Give a function without arguments that returns the model",
            )

    def prepare(self, train: TrainConfig, cache_dir: str) -> CustomTask:
        """See Task."""
        if len(self.dataset) == 0:
            raise ConfigError(
                "train.task.dataset", "0 samples", "it is empty", "Give at least one sample"
            )
        held_out = 0 if self.eval_dataset is None else len(self.eval_dataset)
        if train.eval_every is not None and held_out == 0:
            raise ConfigError(
                "train.eval_every",
                train.eval_every,
                "train.task.eval_dataset has no samples: nothing can be evaluated",
                "Give one with samples, or leave eval_every out where no evaluation is wanted",
            )
        model = self._make(train.seed)
        if train.parallel.tensor > 1:
            raise ConfigError(
                "train.parallel.tensor",
                train.parallel.tensor,
                "a custom model has no tensor-parallel plan",
                "Use tensor = 1 and a larger shard degree",
            )
        for name, param in model.named_parameters():
            if param.requires_grad and str(param.dtype) != "torch.float32":
                raise ConfigError(
                    "train.task.build_model",
                    name,
                    f"it is {param.dtype}; trainable parameters are kept in float32",
                    "Return a float32 model and set train.precision for the computation",
                )
        stateful = [n for n, m in model.named_modules() if getattr(m, "track_running_stats", False)]
        if stateful:
            raise ConfigError(
                "train.task.build_model",
                stateful[0],
                "it keeps running statistics, which are neither healed nor saved",
                "Use track_running_stats=False, or a normalisation without statistics",
            )
        _check_numbers(model)
        _check_json(self.info)
        if not any(param.requires_grad for param in model.parameters()):
            raise ConfigError(
                "train.task.build_model",
                type(model).__name__,
                "no trainable parameters",
                "Return a model with some",
            )
        try_loss(self, model, train.determinism)
        return self

    def warm_up(self) -> None:
        """See PreparedTask. There is nothing to do: what the task needs came with it."""

    def build(self, seed: int) -> tuple[nn.Module, WeightSource]:
        """See PreparedTask. The whole model passes through host memory once."""
        from trainer.models.init import FullWeights

        model = self._make(seed)
        full = {name: param.detach().clone() for name, param in model.named_parameters()}
        _move_parameters_to_meta(model)
        return model, FullWeights(full)

    def flops_per_token(self, model: nn.Module) -> dict[str, float]:
        """See PreparedTask."""
        from trainer.models.flops import SIX_N, count_parameters

        if self.flops_per_term is not None:
            return {"given": self.flops_per_term}
        return {SIX_N: count_parameters(model)}

    def _make(self, seed: int) -> nn.Module:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: object = self.build_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                "train.task.build_model",
                self.build_model,
                f"it returns {type_name(model)}, not an nn.Module",
                "Return the model from it",
            )
        return model

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """See PreparedTask."""
        return self.loss_function(model, batch)

    def train_data(self) -> SampleSource:
        """See PreparedTask."""
        from trainer.data import MapDataset

        return MapDataset(self.dataset)

    def eval_data(self) -> SampleSource | None:
        """See PreparedTask."""
        from trainer.data import MapDataset

        return None if self.eval_dataset is None else MapDataset(self.eval_dataset)


def _check_map_style(field: str, dataset: Any) -> None:
    """A step's samples are taken by number, in an order that the seed gives, by whichever workers
    there are."""
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise ConfigError(
            field,
            type_name(dataset),
            f"it has no {' and no '.join(missing)}: samples are taken by number, and a stream or a "
            "DataLoader has none",
            "Give a map-style dataset (torch.utils.data.Dataset, a list), such as what the "
            "DataLoader reads",
        )


def _check_numbers(model: nn.Module) -> None:
    """Raises ConfigError where a parameter holds NaN, which no update changes. An infinity may be
    meant, as a mask or a gate that is shut."""
    for name, param in model.named_parameters():
        if param.isnan().any():
            raise ConfigError(
                "train.task.build_model",
                name,
                f"{int(param.isnan().sum()):,} of the {param.numel():,} numbers in it are NaN, and "
                "no update changes that",
                "Correct what initialises this parameter, or the file that it is loaded from",
            )


def _check_json(info: Mapping[str, Any]) -> None:
    """It goes into every checkpoint, which holds no pickle."""
    try:
        json.dumps(dict(info), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "train.task.info", info, f"not JSON: {error}", "Keep numbers, texts and lists in it"
        ) from error


def _move_parameters_to_meta(model: nn.Module) -> None:
    """Leaves buffers where they are, and tied parameters tied."""
    from torch import nn

    moved: dict[int, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, moved.setdefault(id(param), meta))
