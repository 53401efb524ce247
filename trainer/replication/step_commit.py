"""The commit vector: the few numbers that every worker agrees on before a step counts.

One float64 vector is summed over the replica (shard x tensor) and then over the replicas:

    [grad norm^2, failed, boundary, save, recorded, overwritten, busy per place ...,
     loss per lane ..., tokens per lane ..., digest per lane ..., gradient per lane ...,
     there and gradient per witness ...]

Each lane's entries are set by the one replica that computed the lane and are zero elsewhere, so
sums are exact and their order does not matter. The norm^2 is that of the already reduced gradient,
equal on every replica, and is the first replica's. `failed` says that a worker's
cross-replica reduce did not come through; `boundary` that a worker has heard of a planned regroup;
`save` that a worker asks for a checkpoint after this step, beside those that are due; `busy` that a
worker is still writing an earlier one. So all know what is saved, and what is skipped, with no word
more. `recorded`, which the lead alone sets, is how many steps the run's records hold: nobody need
keep its own of those. `overwritten` says of a step that failed that the sum has been written over a
worker's lane: then all of its replica compute that lane again, for none can do it alone. `gradient`
is a digest of a lane's gradient, added up over the workers of a replica; that of a witness, and
whether it is there, is of the lane that is drawn (`witnesses.py`).
Design: docs/architecture.md, "A step and its commit".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import mix
from trainer.errors import ConfigError
from trainer.replication.witnesses import WITNESSES, Drawn

Place = Literal["store", "memory"]
"""Where copies of the state go: the checkpoint store, or the memory of the nodes."""

PLACES: tuple[Place, ...] = ("store", "memory")

HEADER = 6 + len(PLACES)
ROWS, GRADIENTS = 4, 3
"""Numbers of each lane, and which of them is its gradient's digest."""
DIGEST_BITS = 32
"""Of one sample: a float64 holds the sum of up to 2**21 of them exactly."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a worker, or all of them together, has to say about saves at a commit."""

    wanted: bool = False
    """A checkpoint is asked for after this step."""
    busy: frozenset[Place] = frozenset()
    """Where an earlier save is still being written: a new one is skipped there."""


@dataclass(frozen=True, kw_only=True)
class LaneStats:
    """What one worker counted in one lane of a step. Only tensor rank 0 of a shard fills it in.

    Raises:
        ConfigError: `tokens` is no whole number.
    """

    tokens: int
    """Targets that the loss was summed over."""
    digest: int
    """`sample_digest` of the samples that this worker read."""

    def __post_init__(self) -> None:
        if self.tokens % 1:  # the user's loss may return anything
            raise ConfigError(
                "train.task.loss_function",
                self.tokens,
                "its count is no whole number, and the bits of a sum of such would depend on the "
                "number of replicas",
                "Return how many losses are in the sum, and weigh those",
            )


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The outcome of one committed step, equal on every worker."""

    step: int
    """Index of the step, 0-based."""
    loss: float
    """Mean loss over the step's tokens, in nats."""
    grad_norm: float
    """Norm of the mean gradient, before clipping."""
    tokens: int
    """Tokens in the step."""
    digests: bytes
    """Per lane, the sum of its workers' sample digests, as int64: every worker of a run shows its
    last commit when it joins, and hundreds of numbers cost more to pickle than all else."""
    boundary: bool
    """Leave after this step: a planned regroup is due."""
    gradients: bytes = b""
    """Per lane, a digest of its gradient, as int64: what a step that is done again is held
    against."""
    generation: int = 0
    """Of the roster that committed it: a gradient of an earlier attempt at the step is another."""
    saving: Saving = Saving()
    """What any worker has to say about saves."""
    recorded: int = 0
    """Steps that the run's records hold, as the lead knew."""

    @property
    def sample_digests(self) -> list[int]:
        """`digests` as numbers."""
        found: list[int] = np.frombuffer(self.digests, dtype=np.int64).tolist()
        return found

    @property
    def finite(self) -> bool:
        """Whether the step may reach the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def scale(self, clip_norm: float) -> float:
        """Factor on the summed gradient: the mean over the tokens, and clipping (0: none)."""
        factor = min(1.0, clip_norm / (self.grad_norm + 1e-6)) if clip_norm else 1.0
        return factor / max(1, self.tokens)


def sample_digest(ids: NDArray[np.int64], first: int) -> int:
    """Proves later which samples a lane consumed, however its shard ranks shared them.

    The sum, over the samples, of 32 bits hashed from (position in the step, id): the digests of the
    parts of a lane add up to the lane's.

    Args:
        ids: ids of consecutive samples.
        first: position of the first of them in the step.
    """
    positions = np.arange(first, first + len(ids), dtype=np.uint64)
    hashed = mix(mix(positions + _GOLDEN) ^ ids.astype(np.uint64)) >> np.uint64(64 - DIGEST_BITS)
    return int(hashed.sum())


def pack(
    lanes: int,
    stats: Mapping[int, LaneStats],
    losses: Mapping[int, float],
    *,
    norm_squared: float,
    failed: bool,
    boundary: bool,
    saving: Saving,
    recorded: int,
    overwritten: bool,
    gradients: Mapping[int, float],
    witnessed: tuple[int, float] | None = None,
) -> list[float]:
    """One worker's contribution to the commit vector, of length `HEADER` + `ROWS` * `lanes` +
    2 * `WITNESSES`. `losses` are sums, in nats, and `gradients` digests, of the lanes in `stats`;
    `witnessed` is which witness it is, and its digest."""
    vector = [norm_squared, float(failed), float(boundary), float(saving.wanted), float(recorded)]
    vector += [float(overwritten)]
    vector += [float(place in saving.busy) for place in PLACES]
    vector += [0.0] * (ROWS * lanes)
    for lane, stat in stats.items():
        of_lane = losses[lane], stat.tokens, stat.digest, gradients[lane]
        for row, value in enumerate(of_lane):
            vector[HEADER + row * lanes + lane] = float(value)
    for number in range(WITNESSES):
        there = witnessed is not None and witnessed[0] == number
        vector += [float(there), witnessed[1] if witnessed is not None and there else 0.0]
    return vector


def read_drawn(vector: Sequence[float], drawn: Drawn, lanes: int) -> dict[int, int]:
    """Position -> digest, of those who computed the lane that was drawn, from a summed vector."""
    found = {drawn.owner: int(vector[HEADER + GRADIENTS * lanes + drawn.lane])}
    for number, position in enumerate(drawn.witnesses):
        at = HEADER + ROWS * lanes + 2 * number
        if vector[at] > 0:
            found[position] = int(vector[at + 1])
    return found


def unpack(vector: Sequence[float], *, step: int, lanes: int, generation: int = 0) -> Commit:
    """Reads a summed vector. Losses are added in lane order, the same on every worker."""
    norm_squared = vector[0]
    loss, tokens, digests, gradients = (
        vector[HEADER + row * lanes : HEADER + (row + 1) * lanes] for row in range(ROWS)
    )
    total_tokens = int(sum(tokens))
    return Commit(
        step=step,
        loss=sum(loss) / max(1, total_tokens),
        grad_norm=math.sqrt(norm_squared) / max(1, total_tokens) if norm_squared >= 0 else math.nan,
        tokens=total_tokens,
        digests=np.asarray(digests).astype(np.int64).tobytes(),
        boundary=vector[2] > 0,
        gradients=np.asarray(gradients).astype(np.int64).tobytes(),
        generation=generation,
        saving=Saving(
            wanted=vector[3] > 0,
            busy=frozenset(
                place for place, busy in zip(PLACES, vector[6:HEADER], strict=True) if busy > 0
            ),
        ),
        recorded=int(vector[4]),
    )
