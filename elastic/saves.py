"""A worker's part of saves: the state is copied on the worker's own thread and written by another.

A save that comes while the last one to the same place is being written is skipped, except at the
end of the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpointing import (
    Keys,
    Store,
    TensorSlice,
    check_room,
    open_memory,
    open_store,
    write_slices,
)
from elastic import events
from elastic.ask import Call, ask
from elastic.job import Job
from elastic.messages import Run
from elastic.outbox import Outbox
from trainer.engine import Engine
from trainer.link import Place


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """One worker's part of a save, on the host."""

    step: int
    """Steps that it contains."""
    generation: int
    """Generation that saves."""
    rank: int
    """The worker's rank in its replica."""
    slices: list[tuple[TensorSlice, torch.Tensor]]
    """What it writes."""
    training_state: dict[str, Any]
    """What lies beside the tensors."""
    begun_at: float
    """When it was copied, in seconds since the epoch."""


class Saves:
    """See the module.

    Args:
        job: what the run is about.
        node: this worker's.
        outbox: to the run's records.
    """

    def __init__(self, job: Job, node: str, outbox: Outbox) -> None:
        self._job, self._node, self._outbox = job, node, outbox
        self._coordinator = job.coordinator
        self._writers: dict[Place, threading.Thread] = {}
        self.receipt: Call | None = None
        """The latest one for the store, as it was handed in."""

    def save(
        self,
        run: Run,
        step: int,
        engine: Engine,
        training_state: dict[str, Any],
        places: Sequence[Place],
    ) -> None:
        """Begins to save the state before `step` to `places`. All workers of the replica call it,
        and agree on what is skipped."""
        if step >= self._job.train.steps:
            self.wait()
            if ask(self._coordinator.saved, step):
                return
        else:
            places = self._idle(run, step, engine, places)
        if not places:
            return
        slices, begun_at = engine.state.to_save(), time.time()
        copy = _Copy(
            step=step,
            generation=run.generation,
            rank=engine.rank,
            slices=slices,
            training_state=training_state,
            begun_at=begun_at,
        )
        for place in places:
            self._writers[place] = threading.Thread(
                target=self._write, args=(place, copy), name=f"save to {place}", daemon=True
            )
            self._writers[place].start()

    def wait(self) -> None:
        """Waits until whatever is being written is written."""
        for writer in self._writers.values():
            writer.join()

    def _idle(self, run: Run, step: int, engine: Engine, places: Sequence[Place]) -> list[Place]:
        """The places where no worker of the replica is busy with an earlier save; all skip the
        others."""
        busy = [float(p in self._writers and self._writers[p].is_alive()) for p in places]
        counts = dict(zip(places, engine.sum_in_replica(busy), strict=True))
        skipped = {"store": events.CheckpointSkipped, "memory": events.SnapshotSkipped}
        for place in places:
            if counts[place] and run.lead:
                reason = "the one before it is still being written"
                self._outbox.event(skipped[place](time=time.time(), step=step, reason=reason))
        return [place for place in places if not counts[place]]

    def _write(self, place: Place, copy: _Copy) -> None:
        coordinator = self._coordinator
        try:
            receipt = write_slices(
                self._open(place, copy),
                Keys(),
                rank=copy.rank,
                step=copy.step,
                generation=copy.generation,
                attempt=0,
                slices=copy.slices,
                segment_bytes=self._job.checkpoint.segment_bytes,
            )
            self._outbox.flush()  # a checkpoint must not count before its steps are in the records
            state, begun_at = copy.training_state, copy.begun_at
            if place == "store":
                self.receipt = coordinator.receipt, (receipt, state, begun_at)
                ask(coordinator.receipt, receipt, state, begun_at)
            else:
                ask(coordinator.snapshot_part, receipt, state, self._node, begun_at)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            failed = coordinator.save_failed if place == "store" else coordinator.snapshot_skipped
            ask(failed, copy.step, reason)

    def _open(self, place: Place, copy: _Copy) -> Store:
        if place == "store":
            return open_store(self._job.paths.checkpoints)
        store = open_memory(self._job.paths.memory, self._node)
        check_room(store, sum(tensor.nbytes for _, tensor in copy.slices))
        return store
