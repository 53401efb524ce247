"""States and gradients that differ among replicas: what a worker does about it.

Who differs from most leaves. Where there is no most, as with two replicas, all remember what they
had, and do the same once more; who then comes to something else was wrong, and leaves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from elastic.protocol import events
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.messages import Run
from elastic.protocol.rpc import Remote
from elastic.worker.outbox import Outbox
from health.corruption import compare_checksums, was_wrong
from health.heartbeat import NO_STEP
from trainer.loop.samples import Skips

CORRUPT_EXIT_CODE = 71

_MASK = 0xFFFFFFFFFFFFFFFF
_WRONG = "its replica's gradient of the lane that was drawn is not the others' in step"
_NO_FAULT = (
    "the dataset gives other items for an index that is read again, or the model draws from "
    "another generator than torch's"
)
"""By these two a sound replica is taken for one that is not."""


class Disputes:
    """One worker's part. It outlives rosters, and the state that the run goes back from.

    Args:
        worker: this one's name.
        coordinator: the run's.
        outbox: to its records.
    """

    def __init__(self, worker: str, coordinator: Remote[CoordinatorApi], outbox: Outbox) -> None:
        self._worker, self._coordinator, self._outbox = worker, coordinator, outbox
        self._states: tuple[int, tuple[int | None, ...], int] = (NO_STEP, (), 0)
        """Step and checksums of a comparison that had no majority, and this worker's position."""
        self._gradients: tuple[int, Skips, int | None] = (NO_STEP, (), None)
        """Step of a lane whose gradients had none, the samples that were passed over by then, and
        the gradient of this worker's replica, if any."""

    def compared(
        self, run: Run, step: int, checksums: Sequence[int | None], confirmed: bool
    ) -> None:
        """The checksums of this worker's slot in all replicas, by position, before `step`, and
        whether those of all slots are `confirmed`. Returns once the coordinator goes by it."""
        found = compare_checksums(checksums)
        shown = ", ".join("-" if c is None else f"{c & _MASK:016x}" for c in checksums)
        # That this slot's are equal says nothing of the others': what is saved by now may be wrong
        # in one of them.
        first_right = next(
            p for p, c in enumerate(checksums) if c is not None and p not in found.outliers
        )
        if run.lead and confirmed if found.equal else run.position == first_right:
            self._outbox.event(
                events.ReplicasCompared(
                    time=time.time(),
                    step=step,
                    equal=found.equal,
                    generation=run.generation,
                    replicas=sum(checksum is not None for checksum in checksums),
                )
            )
        at, before, position = self._states
        if found.equal and at == step and was_wrong(before, position, checksums[run.position]):
            shown = f"{(before[position] or 0) & _MASK:016x}, and when all was done again {shown}"
            self._leave(run, f"its state before step {step} was {shown}", spread=False)
        if run.position in found.outliers:
            detail = f"its state before step {step} differs from most replicas': {shown}"
            self._leave(run, detail, spread=True)
        if found.outliers and run.position == first_right:  # the outlier may die before its call
            self._outbox.flush()
            detail = f"a replica's state before step {step} differs from most: checksums {shown}"
            self._coordinator.call(CoordinatorApi.spread, run.generation, detail)
        if found.decided:
            return
        self._states = step, tuple(checksums), run.position
        if checksums[run.position] is not None:  # all say so: any may die before its call
            self._outbox.flush()
            detail = (
                f"the replicas differ before step {step}, and no majority shows which is right: "
                f"checksums {shown}"
            )
            self._coordinator.call(CoordinatorApi.undecided, run.generation, step, detail)

    def witnessed(self, run: Run, step: int, digests: Mapping[int, int]) -> bool:
        """What the gradient of one lane of `step` was with each replica that computed it, by
        position. Returns whether the step may count; the same on all workers."""
        mine, positions = digests.get(run.position), list(digests)
        found = compare_checksums(list(digests.values()))
        shown = ", ".join(f"{digest:x}" for digest in digests.values())
        at, skips, before = self._gradients
        again = (at, skips) == (step, run.skips)  # with the same samples
        if found.equal:
            proven = len(digests) > 1 and mine is not None  # else nobody has confirmed anything
            if proven and again and before is not None and before != mine:
                self._leave(run, f"{_WRONG} {step}: {before:x}, then {shown}", spread=False)
            if proven:
                self._gradients = NO_STEP, (), None
            return True
        if run.position in [positions[outlier] for outlier in found.outliers]:
            detail = f"{_WRONG} {step}: {mine:x} of {shown}. So it is, too, where {_NO_FAULT}"
            self._leave(run, detail, spread=False)
        if not found.decided:
            if again and run.position == positions[0]:
                self._end_run(run, step, positions, shown)
            self._gradients = step, run.skips, mine
        return False

    def _end_run(self, run: Run, step: int, positions: Sequence[int], shown: str) -> None:
        error = (
            f"the replicas at positions {positions} of the roster compute other gradients of one "
            f"lane in step {step}, twice: {shown}. With a third replica a majority shows which is "
            f"wrong (scaling.max_replicas). None is where {_NO_FAULT}"
        )
        self._outbox.flush()
        self._coordinator.call(CoordinatorApi.fail, error, self._worker, None, run.generation)

    def _leave(self, run: Run, detail: str, *, spread: bool) -> NoReturn:
        self._outbox.flush()
        self._coordinator.call(CoordinatorApi.corrupt, self._worker, run.generation, detail, spread)
        os._exit(CORRUPT_EXIT_CODE)
