"""An optimizer and a schedule that are added from outside the package, in a module that workers can
import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from trainer.optimizer import Schedule, check_ranges


@dataclass(frozen=True, kw_only=True)
class InverseRoot:
    """Falls with the root of the step."""

    lr: float

    def rate(self, step: int, steps: int) -> float:
        """See Schedule."""
        return self.lr / (step + 1) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Lion:
    """One moment, and an update of its sign.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
    """

    schedule: Schedule
    """The learning rate by step."""
    betas: tuple[float, float] = (0.9, 0.99)
    """How much of the moment goes into the update, and stays."""
    weight_decay: float = 0.0
    """Decoupled."""
    clip_norm: float = 1.0
    """See Optimizer."""

    moments: ClassVar[tuple[str, ...]] = ("momentum",)

    @property
    def info(self) -> dict[str, Any]:
        """See Optimizer."""
        return {"name": "lion", **asdict(self)}

    def check(self) -> None:
        """See Optimizer."""
        decay = self.weight_decay
        check_ranges("train.optimizer", [("weight_decay", decay, decay >= 0, "0 or more")])

    def rate(self, step: int, steps: int) -> float:
        """See Schedule."""
        return self.schedule.rate(step, steps)

    def make(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """See Optimizer."""
        return TorchLion(params.values(), lr=0.0, betas=self.betas, weight_decay=self.weight_decay)


class TorchLion(torch.optim.Optimizer):
    """As others bring it: the state is made in the first step."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """All parameters of a group at once."""
        for group in self.param_groups:
            params, (ours, kept) = group["params"], group["betas"]
            grads = [param.grad for param in params]
            for param in params:
                if "momentum" not in self.state[param]:
                    self.state[param]["momentum"] = torch.zeros_like(param)
            momenta = [self.state[param]["momentum"] for param in params]
            updates = torch._foreach_lerp(grads, momenta, ours)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1 - kept)
