"""From the paces of all workers to a verdict: who is slow, and stays so? Pure.

    score = the time that a worker's own part of a step takes at the others' pace / what it takes

The others' pace is the median of each part, so most workers cannot be slow: a step that is slow for
all is nobody's fault. A worker is slow in a round where its score is low and what it lacks is felt
in the step; it is a straggler when that holds for `ROUNDS` rounds running. One slow sample, or
slowness that wanders from worker to worker, is none.

What a worker waits for samples says little: in a run that waits for the slowest reader, all others
find theirs read. So it is held against how long the others take to read.

Whoever has longer samples is slow by the micro-batch and not by the token, whoever has fewer tokens
in as long ones the other way round: it counts what is kinder.

Sources: the score is that of nvidia-resiliency-ext's straggler detection, which flags below 0.75
(0.7 in its callback) and weighs by count and time; five rounds are ByteRobust's (arXiv 2509.16293).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal, NamedTuple

from health.digits import three_digits
from health.pace import Pace

ROUNDS = 5
"""Rounds running."""
SLOW = 0.75
"""Score below which a worker is slow."""
FELT = 0.1
"""Share of a step that it costs, at least. Invented."""

SlowPart = Literal["data", "compute", "optimizer"]
"""The part of its own time that a slow worker loses most in."""

_WORDS: dict[SlowPart, str] = {
    "data": "waiting for samples",
    "compute": "in forward and backward",
    "optimizer": "in the optimizer step",
}


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Of one worker in one round."""

    score: float
    """1: it is as fast as the others; 0.33: a third of that."""
    part: SlowPart
    """Where it loses most."""
    evidence: str
    """What shows it, in words."""


def find_slow(paces: Mapping[str, Pace]) -> dict[str, Slowness]:
    """The slow ones of a round.

    Args:
        paces: worker -> its pace, of all that had micro-batches in the same steps.
    """
    if len(paces) < 2:
        return {}
    others = _Others.of(list(paces.values()))
    found = ((worker, _slowness(pace, others)) for worker, pace in paces.items())
    return {worker: slowness for worker, slowness in found if slowness is not None}


class _Micro(NamedTuple):
    """Seconds of a micro-batch."""

    data_s: float
    read_s: float
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class _Others:
    """Medians over all workers."""

    by_batch: _Micro
    by_token: _Micro
    optimizer_s: float

    @classmethod
    def of(cls, paces: Sequence[Pace]) -> _Others:
        return cls(
            by_batch=_medians(paces, [1.0 for _ in paces]),
            by_token=_medians(paces, [_tokens(pace) for pace in paces]),
            optimizer_s=median_low(p.optimizer_s for p in paces),
        )


def _medians(paces: Sequence[Pace], sizes: Sequence[float]) -> _Micro:
    """Over the workers, each one's micro-batch divided by its size."""
    pairs = list(zip(paces, sizes, strict=True))
    return _Micro(
        data_s=median_low(p.data_s / size for p, size in pairs),
        read_s=median_low(p.read_s / size for p, size in pairs),
        compute_s=median_low(p.compute_s / size for p, size in pairs),
    )


def _tokens(pace: Pace) -> float:
    return max(pace.tokens, 1.0)


def _slowness(own: Pace, others: _Others) -> Slowness | None:
    took = _parts(own, own.data_s, own.compute_s, own.optimizer_s)
    by_batch = _at_pace(own, others.by_batch, 1.0, others.optimizer_s)
    by_token = _at_pace(own, others.by_token, _tokens(own), others.optimizer_s)
    due = max(by_batch, by_token, key=sum)
    took_s, due_s = sum(took), sum(due)
    if took_s <= 0 or due_s / took_s >= SLOW or took_s - due_s < FELT * own.step_s:
        return None
    lost_s, part = max((t - d, part) for part, t, d in zip(_WORDS, took, due, strict=True))
    return Slowness(
        score=due_s / took_s,
        part=part,
        evidence=f"its own part of a step takes {three_digits(took_s)} s, at the others' pace "
        f"{three_digits(due_s)} s; "
        f"{_WORDS[part]} it loses {three_digits(lost_s)} s",
    )


def _at_pace(own: Pace, others: _Micro, size: float, optimizer_s: float) -> _Parts:
    """What a worker's parts would take it at the others' pace, with micro-batches of its size."""
    data_s, read_s, compute_s = (size * seconds for seconds in others)
    sooner_s = max(0.0, own.read_s - read_s)
    return _parts(own, max(min(own.data_s, data_s), own.data_s - sooner_s), compute_s, optimizer_s)


def _parts(own: Pace, data_s: float, compute_s: float, optimizer_s: float) -> _Parts:
    count = own.micro_batches
    return _Parts(count * data_s, count * compute_s, optimizer_s)


class _Parts(NamedTuple):
    """Seconds of a step, in the order of `SlowPart`."""

    data_s: float
    compute_s: float
    optimizer_s: float


def count_rounds(before: Mapping[str, int], slow: Mapping[str, Slowness]) -> dict[str, int]:
    """Worker -> rounds running in which it was slow, with one more round; of the slow ones."""
    return {worker: before.get(worker, 0) + 1 for worker in slow}


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Stragglers that belong together."""

    workers: tuple[str, ...]
    """They."""
    nodes: tuple[str, ...]
    """The machine that they are on; none where it is one of several and cannot be told which."""


def find_blame(
    stragglers: Collection[str],
    slow: Collection[str],
    replicas: Sequence[Sequence[str]],
    unit: int,
    nodes: Mapping[str, str],
) -> list[Blame]:
    """Which machines are at fault.

    Workers of one replica wait for each other within their steps, and those that share samples
    within a block. Where that cannot be told from work they are all slow alike: a replica, or such
    a part of it, whose workers are all slow, on several machines, has its slow one among them.

    Args:
        stragglers: they.
        slow: all that are slow in this round.
        replicas: workers of each replica, by rank.
        unit: workers that share samples, neighbours in rank.
        nodes: worker -> its machine.
    """
    by_node: dict[str, list[str]] = {}
    alike: list[Blame] = []

    def are_alike(group: Sequence[str]) -> bool:
        several = len({nodes[worker] for worker in group}) > 1
        return several and all(worker in slow for worker in group)

    for replica in replicas:
        units = [replica[start : start + unit] for start in range(0, len(replica), unit)]
        for group in [replica] if are_alike(replica) else units:
            found = [worker for worker in group if worker in stragglers]
            if found and are_alike(group):
                alike.append(Blame(workers=tuple(found), nodes=()))
                continue
            for worker in found:
                by_node.setdefault(nodes[worker], []).append(worker)
    told = [Blame(workers=tuple(workers), nodes=(node,)) for node, workers in by_node.items()]
    return [*told, *alike]
