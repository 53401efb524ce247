"""Whether a model can compute and learn at all: asked on the driver, before anything starts.

transformers builds models whose numbers do not go together, and says so in their first step. A
forward on fake tensors, of the model as it would be trained, takes a second and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, blame
from trainer.models.family import ModelFamily
from trainer.models.hf import text_configuration

if TYPE_CHECKING:
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
    # transformers' models compute on any machine; another's may need what this one has not.
    if type(family).build_on_meta is not ModelFamily.build_on_meta:
        return
    import torch
    from torch._subclasses import fake_tensor
    from torch.func import functional_call

    unknown = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    model = family.build_on_meta(config).eval()
    try:
        with torch.no_grad(), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            # The fake product of a mixture of experts takes no other format.
            weights = {
                name: torch.empty(param.shape, dtype=torch.bfloat16)
                for name, param in model.named_parameters()
            }
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            functional_call(model, weights, (), {"input_ids": ids, "use_cache": False})
    except unknown:
        return
    except Exception as error:  # of torch, and of a model's code
        text = text_configuration(config)
        sizes = {n: getattr(text, n) for n in _SIZES if getattr(text, n, None) is not None}
        raise ConfigError(
            "train.task.model.settings",
            ", ".join(f"{name} = {size}" for name, size in sizes.items()),
            f"no {config['model_type']} of these settings computes: {blame(error)}",
            "Use sizes that go together, such as num_key_value_heads that divides "
            "num_attention_heads",
        ) from error
