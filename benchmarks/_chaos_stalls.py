"""How long a run stood still, and what explains it. Pure.

    first roster ── commit ── commit ── … ── last commit ── end
                             └─ a gap, less the time that the schedule explains, has a bound

A fault stalls the healthy for its detection and a regroup (I6). Both are short beside the time that
the slowest honest detection takes; every timeout that is meant for something else is longer. A gap
is no stall for as long as its step takes: with products in 8 bits, which torch emulates on a CPU, a
step takes seconds, and twice as many when one replica of two does it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median_low

from benchmarks._chaos import OF_COORDINATOR, ON_NETWORK, Deed
from benchmarks._chaos_losses import TOGETHER_S
from elastic import HealthConfig
from elastic.protocol.events import (
    CoordinatorStarted,
    Draining,
    Evaluated,
    Event,
    FaultFired,
    Profiled,
    RegroupDone,
    ReplicaForming,
    RunEnded,
    RunStarted,
    StepRecord,
    WorkerJoined,
    WorkerLost,
)
from trainer.loop.device_time import merge

START_S = 60.0
"""Longest wait for workers to start; ten times what it takes alone on the machine."""
IMPORT_S = 10.0
"""By then a worker that has said hello has joined; it takes 1.3 s alone on the machine."""
PROFILE_S = 60.0
"""Longest that a profile of a few steps is written; 31 s were seen where Python emulates layers."""

Stretch = tuple[float, float]
"""From, to, in seconds since the epoch."""


def longest_stall_s(health: HealthConfig) -> float:
    """The longest gap that needs no explanation: time to find the frozen and the cut off by their
    silence. Most faults are found in far less, and the rest is for the regroup and for a machine
    that has other work."""
    return health.freeze_timeout_s + health.node_timeout_s


def find_long_stalls(
    happened: Sequence[Event],
    steps: Sequence[StepRecord],
    health: HealthConfig,
    *,
    least_workers: int,
    deeds: Sequence[Deed] = (),
    evaluation_s: float = 0.0,
) -> list[str]:
    """The gaps that are longer than a fault may stall a run.

    Args:
        happened: all events of one start of a run that has finished.
        steps: its step records, those of lost steps included.
        health: the run's timeouts.
        least_workers: with fewer the run waits: those of `min_replicas`.
        deeds: what was done to its machines and its control plane.
        evaluation_s: how long an evaluation takes at least.
    """
    explained = merge(
        [
            *_waits_for_workers(happened, least_workers),
            *_waits_for_targets(happened),
            *_starts_anew(happened),
            *_deeds(happened, deeds, health),
            *((e.time - evaluation_s, e.time) for e in happened if isinstance(e, Evaluated)),
            *((e.time - PROFILE_S, e.time) for e in happened if isinstance(e, Profiled)),
        ]
    )
    start, limit_s = happened[0].time, longest_stall_s(health)
    work_s = _longest_step_s(happened, steps)
    found = []
    for begin, end in pairwise(_progress(happened, steps)):
        stall_s = (
            end - begin - work_s - sum(_overlap((begin, end), stretch) for stretch in explained)
        )
        if stall_s > limit_s:
            found.append(
                f"stood still for {stall_s:.1f} s without a reason, between "
                f"{begin - start:.1f} and {end - start:.1f} s"
            )
    return found


def _longest_step_s(happened: Sequence[Event], steps: Sequence[StepRecord]) -> float:
    """What the usual step would take in the roster whose replicas have the most lanes each. 0 where
    fewer than two steps were committed."""
    gaps = [end - begin for begin, end in pairwise(sorted(step.time for step in steps))]
    lanes = [max(map(len, e.lanes.values())) for e in happened if isinstance(e, RegroupDone)]
    return median_low(gaps) * max(lanes) / min(lanes) if gaps else 0.0


def _progress(happened: Sequence[Event], steps: Sequence[StepRecord]) -> list[float]:
    """When training began, went on and was over."""
    rosters = [e.time for e in happened if isinstance(e, RegroupDone)]
    ends = [e.time for e in happened if isinstance(e, RunEnded)]
    return sorted([*rosters[:1], *(step.time for step in steps), *ends])


# -- what explains a gap ---------------------------------------------------------------------------


def _waits_for_workers(happened: Sequence[Event], least: int) -> Iterator[Stretch]:
    """While fewer workers than `least` are there for a slot, up to `START_S` each time."""
    changes = [
        change
        for begin, end in _lives(happened).values()
        if begin < end
        for change in ((begin, 1), (end, -1))
    ]
    there, short_since = 0, 0.0
    for time, change in sorted(changes):
        if there < least <= there + change:
            yield short_since, min(time, short_since + START_S)
        elif there + change < least <= there:
            short_since = time
        there += change
    if there < least:
        yield short_since, short_since + START_S


def _starts_anew(happened: Sequence[Event]) -> Iterator[Stretch]:
    """From the end of the run until a driver that came too late to attach has started it anew, with
    nothing to do, up to `START_S` each time."""
    for place, event in enumerate(happened):
        if isinstance(event, RunStarted) and place:
            begin = happened[place - 1].time
            rosters = [e.time for e in happened[place:] if isinstance(e, RegroupDone)]
            yield begin, min([*rosters[:1], begin + START_S])


def _lives(happened: Sequence[Event]) -> dict[str, Stretch]:
    """When each worker could have a slot: from its first place on, or, where it gets none, when it
    has had time to import what it needs; until it is lost, or its machine is to go."""
    lives: dict[str, Stretch] = {}
    for event in happened:
        match event:
            case WorkerJoined():
                lives[event.worker] = event.time + IMPORT_S, float("inf")
            case ReplicaForming():
                for worker in event.workers:
                    begin, end = lives[worker]
                    lives[worker] = min(begin, event.time), end
            case WorkerLost():
                lives[event.worker] = lives[event.worker][0], event.time
            case Draining():
                for worker in event.workers:
                    lives[worker] = lives[worker][0], event.time
    return lives


def _waits_for_targets(happened: Sequence[Event]) -> Iterator[Stretch]:
    """While a fault that is to hit several workers at once holds up the first for the last."""
    firings: dict[str, list[float]] = {}
    for event in happened:
        if isinstance(event, FaultFired):
            firings.setdefault(event.fault, []).append(event.time)
    for fault, times in firings.items():
        whole = len(times) == fault.count("+") + 1
        yield times[0], min(times[0] + TOGETHER_S, times[-1] if whole else float("inf"))


def _deeds(
    happened: Sequence[Event], deeds: Sequence[Deed], health: HealthConfig
) -> Iterator[Stretch]:
    """While the run was paused, a machine was silent, or there was no coordinator to ask."""
    anew = [e.time for e in happened if isinstance(e, CoordinatorStarted) and e.anew]
    for deed in deeds:
        if deed.action.paused:
            yield deed.began, deed.ended
        if deed.action.kind == "remove":
            yield deed.began, deed.ended + health.node_timeout_s
        if deed.action.kind in ON_NETWORK:
            yield deed.began, deed.ended + 2 * health.node_timeout_s
        if deed.action.kind in OF_COORDINATOR:
            yield deed.began, min((t for t in anew if t > deed.began), default=deed.ended)


def _overlap(one: Stretch, other: Stretch) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
