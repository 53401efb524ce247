"""How much each worker computes, and where the time of a step goes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elastic.protocol.events import RunStarted, StepsTimed, WorkerJoined
from elastic.reporting.incidents import Start
from trainer.peaks import peak_flops


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of one worker, while nothing disturbs the run."""

    tokens_per_s: float | None
    """None without two steps that follow each other."""
    flops_per_s: dict[str, float]
    """Of the model, by how its operations are counted."""
    mfu: dict[str, float]
    """Share of what the worker's GPU can do, by the same; empty where that is not known."""


def find_speed(start: Start) -> Speed:
    """The speed of the workers of one start of the run, each of which may have another layout,
    precision or GPU. Of gaps with a regroup nothing is said."""
    started = next((e for e in start.events if isinstance(e, RunStarted)), None)
    rates = [
        gap.tokens / gap.seconds / gap.replicas
        for gap in start.gaps
        if gap.roster is None and gap.seconds > 0
    ]
    if started is None or not rates:
        return Speed(tokens_per_s=None, flops_per_s={}, mfu={})
    tokens_per_s = median(rates) / workers_per_replica(started.layout)
    flops_per_s = {how: n * tokens_per_s for how, n in started.flops_per_token.items()}
    devices = {e.device for e in start.events if isinstance(e, WorkerJoined)}
    peak = find_peak(devices.pop(), started) if len(devices) == 1 else None
    mfu = {} if peak is None else {how: flops / peak for how, flops in flops_per_s.items()}
    return Speed(tokens_per_s=tokens_per_s, flops_per_s=flops_per_s, mfu=mfu)


def find_peak(device: str, started: RunStarted) -> float | None:
    """What a GPU can do in the format of the run's products, in operations per second; None where
    it is not known. `fast` computes those of float32 in TF32 (trainer/backend/determinism.py)."""
    fast = (started.settings or {}).get("determinism") == "fast"
    in_tf32 = fast and started.precision == "float32"
    return peak_flops(device, "tf32" if in_tf32 else started.precision)


def workers_per_replica(layout: dict[str, int]) -> int:
    """The product of the dimensions inside a replica, of `RunStarted.layout`."""
    return math.prod(n for name, n in layout.items() if name not in ("replicas", "lanes", "spares"))


def mean_parts(timed: Sequence[StepsTimed]) -> tuple[int, dict[str, float]]:
    """How many steps were timed, and the mean of each part in seconds."""
    steps = sum(event.steps for event in timed)
    sums: dict[str, float] = {}
    for event in timed:
        for part, seconds in event.seconds.items():
            sums[part] = sums.get(part, 0.0) + event.steps * seconds
    return steps, {part: total / steps for part, total in sums.items()}
