"""Layers whose parameters are the model's own, and whose work is Transformer Engine's.

The library's modules are made at the first call, without memory, and hang at ours without being
registered: to FSDP2, tensor parallelism and checkpoints there are the model's parameters alone.
Each call lends them the weight as it is then, whole or this tensor rank's part. What tensor ranks
send each other is ours (`OwnLinear`): the library computes on local tensors.

In a dry run, on fake tensors, torch computes in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from trainer.parallel.own_linear import OwnLinear
from trainer.te import library

ATTENTION = "transformer_engine"
"""Its name among transformers' implementations of attention."""


class TeLinear(OwnLinear):
    """A linear layer by `te.Linear`; its bias, where it has one, is added by torch."""

    recipe: library.Recipe | None
    _te: Any = None

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See OwnLinear."""
        if detect_fake_mode() is not None:
            return F.linear(x, weight)
        if self._te is None:
            out_features, in_features = weight.shape
            made = library.load().Linear(
                in_features, out_features, bias=False, params_dtype=weight.dtype, device="meta"
            )
            object.__setattr__(self, "_te", made)
        with library.in_8_bits(self.recipe):
            y: torch.Tensor = library.lend(self._te, weight)(x)
        return y


class TeRMSNorm(nn.Module):
    """A norm by `te.RMSNorm`. Over tensor ranks each works on its part of the sequence."""

    _te: Any = None

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Any) -> torch.Tensor:
        """Shapes: x_BSD to x_BSD."""
        if not isinstance(x, DTensor):
            return self._norm(x, self.weight)
        weight: Any = self.weight
        y = self._norm(x.to_local(), weight.to_local(grad_placements=(Partial(),)))
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if detect_fake_mode() is not None:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        if self._te is None:
            made = library.load().RMSNorm(
                weight.shape[0], eps=self.eps, dtype=weight.dtype, device="meta"
            )
            object.__setattr__(self, "_te", made)
        y: torch.Tensor = library.lend(self._te, weight)(x)
        return y


def attention(
    module: nn.Module,
    q_BHSD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention by `te.DotProductAttention`, in transformers' form: H heads of queries, G of
    keys and values, to (B, S, H, D).

    Args:
        module: transformers' attention, which keeps the library's module for itself.
        q_BHSD: queries.
        k_BGSD: keys.
        v_BGSD: values.
        attention_mask: None, as no sample is padded.
        scaling: of the scores.
    """
    if attention_mask is not None:
        raise ValueError("Transformer Engine's attention is causal here, and takes no mask")
    heads, groups, size = q_BHSD.shape[1], k_BGSD.shape[1], q_BHSD.shape[3]
    if detect_fake_mode() is not None:
        y_BHSD = F.scaled_dot_product_attention(
            q_BHSD, k_BGSD, v_BGSD, is_causal=True, scale=scaling, enable_gqa=heads != groups
        )
        return y_BHSD.transpose(1, 2), None
    te: Any = module.__dict__.get("_te")
    if te is None:
        te = library.load().DotProductAttention(
            heads,
            size,
            num_gqa_groups=groups,
            qkv_format="bshd",
            attn_mask_type="causal",
            softmax_scale=scaling,
        )
        object.__setattr__(module, "_te", te)
    q, k, v = (part.transpose(1, 2).contiguous() for part in (q_BHSD, k_BGSD, v_BGSD))
    return te(q, k, v).unflatten(-1, (heads, size)), None
