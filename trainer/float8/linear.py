"""A linear layer in 8-bit floating point."""

from __future__ import annotations

import torch

from trainer.float8.products import Recipe, linear
from trainer.parallel.own_linear import OwnLinear
from trainer.parallel.together import Together


class Float8Linear(OwnLinear):
    """An `nn.Linear` whose products are 8-bit.

    Over tensor ranks each scales its own part of a weight and of what it multiplies: no more is
    sent than without.
    """

    recipe: Recipe
    together: Together
    """Where its weight is gathered in 8 bits: with which others."""

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See OwnLinear."""
        return linear(x, weight, self.recipe)
