"""A transformers model whose attention is a ring's, through transformers' own registry of attention
implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.errors import ConfigError
from trainer.parallel.context.ring import Ring, ring_attention

IMPLEMENTATION = "elastic_ring"
"""Its name in the registry. transformers makes no mask for one that has no maker of masks there."""

_MORE = ("sliding_window", "softcap", "position_bias", "s_aux", "cache")
"""Arguments of an attention that is more than a softmax over the tokens before."""


def put_ring_in(model: nn.Module, ring: Ring) -> None:
    """Has all attention of a transformers model go round `ring`. In place, before anything splits
    the model, which a converter may have wrapped.

    Raises:
        ConfigError: it has none, as a converter has replaced it.
    """
    config = _config_of(model)
    # `is_causal` is transformers' mark of an attention.
    attentions = [module for module in model.modules() if hasattr(module, "is_causal")]
    if config is None or not attentions:
        raise ConfigError(
            "train.converters",
            type(model).__name__,
            "the model has no attention of transformers', whose place a ring could take",
            "Use train.parallel.context = 1 and texts='joined', or converters that leave attention "
            "as it is",
        )
    for module in (model, *attentions):
        cast(Any, module).ring = ring
    config._attn_implementation = IMPLEMENTATION


def _config_of(model: nn.Module) -> Any:
    """The outermost transformers configuration of a model and what it wraps; None: it has none."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if isinstance(config, PreTrainedConfig)), None)


def ring_of(model: nn.Module) -> Ring | None:
    """The ring that `put_ring_in` has put there, if it has."""
    network: Any = model
    if not hasattr(network, "ring"):  # a converter has wrapped the model
        rings = [module.ring for module in model.modules() if hasattr(module, "ring")]
        network.ring = rings[0] if rings else None
    return network.ring


def tell_documents(model: nn.Module, documents: Sequence[Any] | None) -> None:
    """Says where the texts begin in the micro-batch that the model is about to compute."""
    ring = ring_of(model)
    if ring is not None:
        ring.documents = documents
    if documents is not None and (
        ring is None or getattr(_config_of(model), "_attn_implementation", None) != IMPLEMENTATION
    ):
        raise ConfigError(
            "train.task.texts",
            "apart",
            "a converter has put another attention in the place of the one that keeps them apart",
            "Use 'joined', or converters that leave attention as it is",
        )


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface of an attention.

    Shapes: query (batch, heads, tokens, head dim), key and value with fewer or as many heads;
    returns (batch, tokens, heads, head dim).

    Raises:
        ConfigError: the model asks for more than a ring computes.
    """
    asked = {name for name in _MORE if more.get(name) is not None}
    asked |= {"a mask"} if attention_mask is not None else set()
    asked |= {"dropout"} if dropout else set()
    causal = module.is_causal if is_causal is None else is_causal
    if asked or not causal:
        raise ConfigError(
            "train.task.model.architecture",
            type(module).__name__,
            "its attention needs what context parallelism and texts apart do not compute: "
            + (", ".join(sorted(asked)) or "later tokens"),
            "Use train.parallel.context = 1 and texts='joined', or another architecture",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out, _ = ring_attention(query, key, value, scale, module.ring.key)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
