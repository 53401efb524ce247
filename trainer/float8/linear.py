"""A linear layer in 8-bit floating point, whole or split over tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from trainer.float8.products import Recipe, linear


class Float8Linear(nn.Linear):
    """An `nn.Linear` with the same parameters, whose products are 8-bit.

    Over tensor ranks each scales its own part of a weight and of what it multiplies: no more is
    sent than without.
    """

    recipe: Recipe

    @classmethod
    def of(cls, layer: nn.Linear, recipe: Recipe) -> Float8Linear:
        """A layer with the parameters of `layer`."""
        made = cls(
            layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
        )
        made.weight, made.bias, made.recipe = layer.weight, layer.bias, recipe
        return made.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (..., in) to (..., out)."""
        weight = self.weight
        if isinstance(weight, DTensor):
            y = _over_tensor_ranks(x, weight, self.recipe)
        else:
            y = linear(x, weight, self.recipe)
        return y if self.bias is None else y + self.bias


def _over_tensor_ranks(x: Any, weight: DTensor, recipe: Recipe) -> torch.Tensor:
    """This rank's part: of the outputs, or of the sums that make them."""
    by_outputs = weight.placements == (Shard(0),)
    taken: Placement = Replicate() if by_outputs else Shard(x.dim() - 1)
    given: Placement = Shard(x.dim() - 1) if by_outputs else Partial()
    if x.placements != (taken,):
        x = x.redistribute(placements=(taken,))
    # Of whole inputs, each rank has the part of the gradient that comes from its outputs.
    x_local = x.to_local(grad_placements=(Partial(),) if by_outputs else None)
    y_local = linear(x_local, weight.to_local(), recipe)
    return DTensor.from_local(y_local, weight.device_mesh, (given,), run_check=False)
