"""Floating-point operations that a model needs for one token, forward and backward.

Three countings, each said beside its numbers:

    6N          6 for each parameter that multiplies: 2 forward, 4 backward. A frozen one has 4, as
                no gradient of it is computed. The embedding table is looked up and does not count,
                unless the head has the same weights; of a mixture of experts the active ones count.
    attention   6N + 12 · layers · heads · head size · sequence: all pairs of tokens
    causal      6N + 6 · layers · heads · head size · sequence: the pairs that a causal mask leaves

In a layer whose tokens see a window of w before them, w · (2 - w / sequence) stands in the place of
the sequence: `causal` is then the pairs that are left, and `attention` twice those. A model with
layers of another kind, as linear attention, has 6N alone: what these compute is not counted here,
and it is not the pairs. So has one that keeps a sample's texts apart: only the data say which pairs
are left.

What is recomputed is not counted, so these are model FLOPs. Sources: Chowdhery et al., "PaLM"
(arXiv 2204.02311), appendix B; `get_dense_model_nparams_and_flops` of pytorch/torchtitan. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.models.hf import head_size, text_configuration

if TYPE_CHECKING:
    from torch import nn

SIX_N, ATTENTION, CAUSAL = "6N", "attention", "causal"

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, by transformers' names."""

_EXPERT = re.compile(r"(^|\.)experts\.")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of their number in configurations."""


def count_parameters(model: nn.Module, active_experts: float = 1.0) -> float:
    """The counting 6N: operations of one token.

    Args:
        model: whole, on any device; the meta device will do.
        active_experts: share of the experts that a token goes through.
    """
    from torch import nn

    tables, others = set[int](), set[int]()
    for module in model.modules():
        found = tables if isinstance(module, nn.Embedding) else others
        found.update(id(param) for param in module.parameters(recurse=False))
    return sum(
        param.numel()
        * (6 if param.requires_grad else 4)
        * (active_experts if _EXPERT.search(name) else 1)
        for name, param in model.named_parameters()
        if id(param) in others or id(param) not in tables
    )


def flops_of_transformer(
    model: nn.Module, config: Mapping[str, Any], seq_len: int, *, apart: bool = False
) -> dict[str, float]:
    """Operations of one token by counting; 6N alone where the configuration does not say how its
    attention is, or not which pairs of tokens it looks at.

    Args:
        model: whole.
        config: its complete transformers configuration.
        seq_len: tokens in a sample.
        apart: whether a sample's texts are kept apart.
    """
    text = text_configuration(config)
    parameters = count_parameters(model, _active_experts(text))
    width, seen = _attention_width(text), _seen(text, seq_len)
    if width is None or seen is None or apart:
        return {SIX_N: parameters}
    pairs = 12 * width * seen
    return {SIX_N: parameters, ATTENTION: parameters + pairs, CAUSAL: parameters + pairs / 2}


def _active_experts(text: Any) -> float:
    experts = next((n for n in (getattr(text, name, None) for name in _EXPERTS) if n), None)
    each = getattr(text, "num_experts_per_tok", None)
    return each / experts if experts and each else 1.0


def _seen(text: Any, seq_len: int) -> float | None:
    """Tokens that one sees in a layer, the mean of the layers, where no mask but a window's is
    counted. None: there are layers of another kind."""
    window = min(getattr(text, "sliding_window", None) or seq_len, seq_len)
    seen = {_FULL: float(seq_len), _SLIDING: window * (2 - window / seq_len)}
    # Without kinds of layers a window is that of all.
    kinds = getattr(text, "layer_types", None) or [_SLIDING]
    if not seen.keys() >= set(kinds):
        return None
    return sum(seen[kind] for kind in kinds) / len(kinds)


def _attention_width(text: Any) -> float | None:
    """Layers times heads times head size."""
    layers, heads = (
        getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads")
    )
    size = head_size(text)
    if not layers or not heads or not size:
        return None
    keys, values = (getattr(text, name, None) for name in ("qk_head_dim", "v_head_dim"))
    if keys and values:  # multi-head latent attention: they differ
        return layers * heads * (keys + values) / 2
    return layers * heads * size
