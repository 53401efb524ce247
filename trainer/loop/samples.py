"""Which samples a step takes, and what its random numbers are seeded with. Pure; no worker enters
into it.

The samples of the run stand in one endless seeded order. A step takes the next `global_batch` of
them, after those that the run was told to pass over (`Skip`); each lane takes an equal stretch of
these, each shard rank an equal stretch of the lane's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config import TrainConfig
from trainer.data import sample_ids
from trainer.errors import TrainerError
from trainer.replication.step_commit import sample_digest

_MASK = 0xFFFFFFFFFFFFFFFF

Ids = NDArray[np.int64]


class Skip(NamedTuple):
    """Samples that the run passes over."""

    step: int
    """The first step that takes others."""
    batches: int
    """Global batches that are left out before it."""


Skips = tuple[Skip, ...]


def batch_of(step: int, skips: Skips) -> int:
    """Which global batch of the endless order a step takes."""
    return step + sum(skip.batches for skip in skips if skip.step <= step)


class LedgerError(TrainerError):
    """The samples that a step committed are not the ones it should have taken."""

    def __init__(self, step: int, lane: int) -> None:
        super().__init__(step, lane)
        self.step, self.lane = step, lane

    def __str__(self) -> str:
        return (
            f"step {self.step}, lane {self.lane}: the digest of the committed samples is not that "
            f"of the samples due. The run used other data or another seed than configured here."
        )


def step_ids(train: TrainConfig, samples: int, step: int, skips: Skips = ()) -> Ids:
    """Ids of the samples of a step, in lane order. `samples`: how many there are in the data."""
    first = batch_of(step, skips) * train.global_batch
    return sample_ids(train.seed, first, train.global_batch, samples)


def lane_ids(
    train: TrainConfig,
    lanes: int,
    samples: int,
    step: int,
    lane: int,
    shard: int,
    skips: Skips = (),
) -> Ids:
    """Ids of the samples that one shard rank takes in one lane of a step."""
    start = batch_of(step, skips) * train.global_batch + lane_start(train, lanes, lane, shard)
    return sample_ids(train.seed, start, train.lane_samples(lanes), samples)


def micro_batches(
    train: TrainConfig,
    lanes: int,
    samples: int,
    shard: int,
    *,
    steps: range,
    missing: Sequence[int],
    dealt: Callable[[int], Sequence[int]],
    skips: Skips = (),
) -> Iterator[Ids]:
    """Ids of the micro-batches that one shard rank takes in a generation, in order: of the
    `missing` lanes in the first of `steps`, and in each of the others of those that its replica
    computes there, which are `dealt`."""
    micro = train.micro_samples(lanes)
    for step in steps:
        for lane in missing if step == steps.start else dealt(step):
            ids = lane_ids(train, lanes, samples, step, lane, shard, skips)
            yield from (ids[start : start + micro] for start in range(0, len(ids), micro))


def lane_start(train: TrainConfig, lanes: int, lane: int, shard: int) -> int:
    """Position in the step of the first sample that one shard rank takes in one lane."""
    return (lane * train.parallel.shard + shard) * train.lane_samples(lanes)


def micro_seed(*parts: int) -> int:
    """A seed for a micro-batch's random numbers, from (seed, step, lane, index, `Slot.fsdp`)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 + 1) & _MASK
        state ^= state >> 29
    return state >> 1


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Which samples every step of a run must take (I2). Pure data; it crosses to whoever checks."""

    seed: int
    """Seed of the run."""
    global_batch: int
    """Samples in a step."""
    lanes: int
    """Lanes of the run."""
    samples: int
    """Samples in the data."""
    skips: Skips = ()
    """Those that are passed over."""

    def check(self, step: int, digests: Sequence[int]) -> Ids:
        """Holds what a committed step took against what it should have taken.

        Args:
            step: which.
            digests: per lane, what the workers computed from the ids they read.

        Returns:
            The ids of the step, in lane order.

        Raises:
            LedgerError: other samples.
        """
        ids = self._ids(step)
        if len(digests) != self.lanes:
            raise LedgerError(step, 0)
        for lane, (due, digest) in enumerate(zip(self._digests(ids), digests, strict=True)):
            if due != digest:
                raise LedgerError(step, lane)
        return ids

    def digests(self, step: int) -> list[int]:
        """Per lane, what the workers compute from the ids of a step."""
        return list(self._digests(self._ids(step)))

    def _ids(self, step: int) -> Ids:
        first = batch_of(step, self.skips) * self.global_batch
        return sample_ids(self.seed, first, self.global_batch, self.samples)

    def _digests(self, ids: Ids) -> Iterator[int]:
        size = self.global_batch // self.lanes
        for start in range(0, self.lanes * size, size):
            yield sample_digest(ids[start : start + size], start)


def samples_sha256(
    train: TrainConfig,
    lanes: int,
    samples: int,
    committed: Iterable[tuple[int, list[int]]],
    skips: Skips = (),
) -> str:
    """SHA-256 over the ids of the committed samples, in order, each held against the ledger.

    Args:
        train: the settings of the run.
        lanes: lanes of the run.
        samples: samples in the data.
        committed: (step, per lane the digest that the workers computed from the ids they read),
            every step of the run once and in order.
        skips: samples that the run has passed over.

    Raises:
        LedgerError: a step is missing, or took other samples.
    """
    total, found = hashlib.sha256(), list(committed)
    ledger = Ledger(
        seed=train.seed,
        global_batch=train.global_batch,
        lanes=lanes,
        samples=samples,
        skips=skips,
    )
    for step in range(train.steps):
        if step >= len(found) or found[step][0] != step:
            raise LedgerError(step, 0)
        total.update(ledger.check(step, found[step][1]).astype("<i8").tobytes())
    return total.hexdigest()
