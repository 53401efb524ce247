"""A linear layer that computes its product in a way of its own, whole or split over tensor
ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

_Own = TypeVar("_Own", bound="OwnLinear")


class OwnLinear(nn.Linear, ABC):
    """An `nn.Linear` with the same parameters, and another product."""

    @classmethod
    def of(cls: type[_Own], layer: nn.Linear) -> _Own:
        """A layer with the parameters of `layer`."""
        made = cls(
            layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
        )
        made.weight, made.bias = layer.weight, layer.bias
        return made.train(layer.training)

    @abstractmethod
    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T` of ordinary tensors, with its gradients. Shapes: (..., in), (out, in)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (..., in) to (..., out)."""
        weight = self.weight
        if isinstance(weight, DTensor):
            y = self._over_tensor_ranks(x, weight)
        else:
            y = self.product(x, weight)
        return y if self.bias is None else y + self.bias

    def _over_tensor_ranks(self, x: Any, weight: DTensor) -> torch.Tensor:
        """This rank's part: of the outputs, or of the sums that make them."""
        by_outputs = weight.placements == (Shard(0),)
        features = Shard(x.dim() - 1)
        taken: Placement = Replicate() if by_outputs else features
        if x.placements != (taken,):
            x = x.redistribute(placements=(taken,))
        # Of whole inputs, each rank has the part of the gradient that comes from its outputs.
        x_local = x.to_local(grad_placements=(Partial(),) if by_outputs else None)
        y_local = self.product(x_local, weight.to_local())
        given = features if by_outputs else Partial()
        return DTensor.from_local(y_local, weight.device_mesh, (given,), run_check=False)
