"""Whether a model can compute and learn at all: asked on the driver, before anything starts.

transformers builds models whose numbers do not go together, and says so in their first step. A
forward on fake tensors, of the model as it would be trained, takes a second and no memory.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, blame
from trainer.models.family import ModelFamily
from trainer.models.hf import text_configuration

if TYPE_CHECKING:
    import torch
    from torch import nn

_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""What most often does not go together, by the names that all architectures share."""


def check_sizes(config: Mapping[str, Any], model: nn.Module) -> None:
    """Raises ConfigError where a model has no block, or a parameter without a number in it.

    Args:
        config: the complete configuration.
        model: of it, on any device.
    """
    if getattr(text_configuration(config), "num_hidden_layers", None) == 0:
        raise ConfigError(
            "train.task.model.settings",
            "num_hidden_layers = 0",
            "a model without blocks sees no token but the last",
            "Use 1 or more",
        )
    for name, param in model.named_parameters():
        if param.numel() == 0:
            raise ConfigError(
                "train.task.model.settings",
                name,
                f"this parameter would have the shape {tuple(param.shape)}: there is nothing in it "
                "to learn",
                "Use 1 or more for each size",
            )


def check_computes(family: ModelFamily, config: Mapping[str, Any], tokens: int) -> None:
    """Checks that the forward of a model goes through, by the shapes of its tensors. For one of
    which a small copy has failed for real: fake tensors alone do not know every operator.

    Args:
        family: of the model.
        config: the complete configuration.
        tokens: in the sample that it is given.

    Raises:
        ConfigError: it does not.
    """
    # Another family's models may need what this machine has not.
    if type(family).build_on_meta is not ModelFamily.build_on_meta:
        return
    import torch

    model = family.build_on_meta(config).eval()
    # The fake product of a mixture of experts takes bfloat16 alone, a model's own buffers float32.
    errors: list[Exception] = []
    for dtype in (torch.bfloat16, torch.float32):
        error = _forward_error(model, tokens, dtype)
        if error is None or not _is_of_the_model(error):
            return
        errors.append(error)
    text = text_configuration(config)
    sizes = {n: getattr(text, n) for n in _SIZES if getattr(text, n, None) is not None}
    heads, shared = (sizes.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    uneven = bool(heads and shared and heads % shared)
    raise ConfigError(
        "train.task.model.settings",
        ", ".join(f"{name} = {size}" for name, size in sizes.items()),
        f"no {config['model_type']} of these settings computes: {blame(errors[0])}",
        "Use a num_key_value_heads that divides num_attention_heads"
        if uneven
        else "Correct the setting that the error speaks of",
    ) from errors[0]


def _forward_error(model: nn.Module, tokens: int, dtype: torch.dtype) -> Exception | None:
    """What a forward on fake tensors raises; None where it goes through, or is not known."""
    import torch
    from torch._subclasses import fake_tensor
    from torch.func import functional_call

    unknown = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    try:
        with torch.no_grad(), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            weights = {
                name: torch.empty(param.shape, dtype=dtype)
                for name, param in model.named_parameters()
            }
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            functional_call(model, weights, (), {"input_ids": ids, "use_cache": False})
    except unknown:
        return None
    except Exception as error:  # of torch, and of a model's code
        return error
    return None


def _is_of_the_model(error: Exception) -> bool:
    """Whether torch or transformers has raised it, and not a package of kernels, which transformers
    takes where it is installed and which may need a GPU."""
    import torch
    import transformers

    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = [os.path.join(package.__path__[0], "") for package in (torch, transformers)]
    return last.startswith(tuple(ours))
