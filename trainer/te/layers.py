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

from trainer.float8.products import padded
from trainer.parallel.own_linear import OwnLinear
from trainer.te import library


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
        x_MK = x.flatten(0, -2)
        # In 8 bits the library takes rows by 8 in forward, and by 16 for the weight's gradient.
        taken = x_MK if self.recipe is None else padded(x_MK)
        with library.in_8_bits(self.recipe):
            y: torch.Tensor = library.lend(self._te, weight)(taken)
        return y[: len(x_MK)].unflatten(0, x.shape[:-1])


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
