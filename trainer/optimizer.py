"""Optimizers and learning-rate schedules: what a run asks of one. Imports without torch.

`OptimizerConfig` (AdamW) in `trainer/config.py` is one optimizer; `trainer/engine/optimizer.py`
tries them and makes them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from checkpointing.field_types import type_name
from trainer.errors import ConfigError, RateError, check_types

if TYPE_CHECKING:
    import torch
    from torch import nn

_WHERE = "train.optimizer"
_TAKEN = ("param", "step")
"""What a moment cannot be called: in a checkpoint and in an optimizer's state these are others."""

Range = tuple[str, float, bool, str]
"""A setting's name, its value, whether that is in its range, and what to use."""


class Schedule(Protocol):
    """The learning rate by step. A frozen dataclass of plain values: it goes to every worker, and
    its fields stand in every checkpoint."""

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step. Pure; it is on the step path.

        Args:
            step: from 0 on.
            steps: of the whole run.
        """
        ...


class Optimizer(Schedule, Protocol):
    """What turns gradients into weights, with its learning rate by step.

    An object of it is plain data that the driver and every worker use, so it must be picklable and
    importable on the workers. The update must be elementwise, because each worker updates its own
    slices alone; `trainer.engine.optimizer.try_optimizer` checks that and the rest.
    """

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors that `make`'s optimizer keeps for each parameter, as keys of
        its `state`. They have the parameter's shape and type, begin at zero and are updated in
        place. A checkpoint has them as `NAME/PARAMETER`. An optimizer that keeps them in another
        type says so: `moment_dtype = "bfloat16"`, or "float32". One that can update bfloat16
        parameters by float32 gradients, and is to have such, has `master_dtype = "bfloat16"`."""
        ...

    @property
    def clip_norm(self) -> float:
        """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """The settings for the checkpoints, JSON values."""
        ...

    def check(self) -> None:
        """The driver asks before anything starts.

        Raises:
            ConfigError: a value is out of its range.
        """
        ...

    def make(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of this worker's slices. Its `step` is on the step path: no loop over
        parameters that torch's `_foreach` functions can spare, no wait for the device.

        Args:
            params: by the parameter's name, its local slice, which may be empty. All of them are to
                be in the optimizer's groups, with one `lr`; before each step that of every group is
                set to the same rate.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warm-up, then a cosine. Source: Loshchilov and Hutter, SGDR, 2017."""

    lr: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr_ratio: float = 0.1
    """Learning rate at the last step, as a share of `lr`."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0; fewer than those of the run."""

    def __post_init__(self) -> None:
        check_types(self, f"{_WHERE}.schedule")
        check_ranges(f"{_WHERE}.schedule", self.ranges(self))

    @staticmethod
    def ranges(config: Any) -> list[Range]:
        """Those of the three fields, also of a config that has them beside others."""
        return [
            ("lr", config.lr, config.lr > 0, "a positive learning rate"),
            ("min_lr_ratio", config.min_lr_ratio, 0 <= config.min_lr_ratio <= 1, "a share, 0 to 1"),
            ("warmup_steps", config.warmup_steps, config.warmup_steps >= 0, "0 or more steps"),
        ]

    def rate(self, step: int, steps: int) -> float:
        """See Schedule."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        span = max(1, steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)


def moment_dtype(optimizer: Optimizer, like: str) -> str:
    """Number format of the moments of a parameter whose own is `like`."""
    said = getattr(optimizer, "moment_dtype", None)
    return said if said in ("float32", "bfloat16") else like


def master_dtype(optimizer: Optimizer) -> str:
    """Number format of the parameters that the optimizer updates."""
    return "bfloat16" if getattr(optimizer, "master_dtype", None) == "bfloat16" else "float32"


def check_ranges(where: str, ranges: Sequence[Range]) -> None:
    """Raises ConfigError for the first setting that is out of its range, or no finite number.

    Args:
        where: what the user calls the settings' owner.
        ranges: of each.
    """
    for name, value, ok, wanted in ranges:
        if not ok or not math.isfinite(value):
            raise ConfigError(f"{where}.{name}", value, "out of range", f"Use {wanted}")


def check_schedule(schedule: Any) -> None:
    """Raises ConfigError where a value is no schedule."""
    is_data = dataclasses.is_dataclass(schedule) and not isinstance(schedule, type)
    if not is_data or not callable(getattr(schedule, "rate", None)):
        raise ConfigError(
            f"{_WHERE}.schedule",
            schedule,
            f"of type {type_name(schedule)}, not a schedule",
            "Use WarmupCosine(...), or an object of a dataclass with rate(step, steps)",
        )


def check_optimizer(optimizer: Any) -> None:
    """Checks what can be known of an optimizer without torch.

    Raises:
        ConfigError: it is none, or its moments have names that cannot be.
    """
    parts = ("moments", "clip_norm", "info", "check", "make", "rate")
    missing = [part for part in parts if not hasattr(optimizer, part)]
    if missing or isinstance(optimizer, type):
        raise ConfigError(
            _WHERE,
            optimizer,
            f"of type {type_name(optimizer)}, not an optimizer: it has no {', '.join(missing)}"
            if missing
            else "a class, not an object of it",
            "Use OptimizerConfig(...), or an object with what trainer.optimizer.Optimizer names",
        )
    check_moments(optimizer.moments, f"{_WHERE}.moments")
    clip_norm = optimizer.clip_norm
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float):
        raise ConfigError(f"{_WHERE}.clip_norm", clip_norm, "not a number", "Use a number")


def check_moments(moments: Any, where: str) -> None:
    """Raises ConfigError where these are no names of moments. `where`: what the user calls them."""
    fix = f"Use a tuple of different names, each of letters, digits and _, none of {_TAKEN}"
    if not isinstance(moments, tuple) or not all(isinstance(name, str) for name in moments):
        raise ConfigError(where, moments, "not a tuple of texts", fix)
    for name in moments:
        if not name.isidentifier() or name in _TAKEN or moments.count(name) > 1:
            raise ConfigError(where, moments, f"{name!r} cannot be the name of a moment", fix)


def check_settings(optimizer: Optimizer, steps: int) -> None:
    """Checks what an optimizer's settings come to, once they are in their ranges.

    Raises:
        ConfigError: they cannot stand in a checkpoint, the warm-up takes all of `steps`, or the
            learning rate of the first or the last of them is no number of 0 or more.
    """
    try:
        json.dumps(dict(optimizer.info), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{_WHERE}.info",
            optimizer.info,
            f"not JSON: {error}",
            "Keep finite numbers, texts and lists in it",
        ) from error
    _check_warmup(optimizer, steps)
    for step in (0, steps - 1):
        checked_rate(optimizer, step, steps)


def checked_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """The learning rate of a step. It is on the step path.

    Raises:
        RateError: it is no finite number, 0 or more.
    """
    rate: Any = optimizer.rate(step, steps)
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise RateError(
            _WHERE,
            optimizer,
            f"the learning rate of step {step} of {steps} is {rate!r}",
            "Have rate(step, steps) return a finite number, 0 or more",
        )
    return rate


def _check_warmup(optimizer: Any, steps: int) -> None:
    schedule = getattr(optimizer, "schedule", None)
    where, owner = (_WHERE, optimizer) if schedule is None else (f"{_WHERE}.schedule", schedule)
    warmup_steps = getattr(owner, "warmup_steps", 0)
    if warmup_steps > 0 and warmup_steps >= steps:
        raise ConfigError(
            f"{where}.warmup_steps",
            warmup_steps,
            f"the run has {steps} steps, and would end before the learning rate begins to fall",
            f"Use {steps - 1} or fewer, or more train.steps",
        )
