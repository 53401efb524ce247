"""A worker's part of saves: it copies its share of the state, and its node's uploader writes it.

The copy goes into memory that is made once (`trainer/engine/host_copy.py`): one buffer where only
checkpoints are written, two where snapshots are taken as well, each as large as the worker's share.
So a save allocates nothing. The copy is made beside the next step, whose update alone waits for
what is left of it. A thread waits for the uploader's answer; a save that comes before it is skipped
by all workers together, because each commit says who is still busy
(`trainer/replication/step_commit.py`). At the end of the run it is waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch

from checkpointing import Attempt, Written
from elastic.node.uploader import hand_in, report_failure, write_and_tell
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.job import Job
from elastic.protocol.messages import Identity, Run
from elastic.protocol.rpc import RETRY_S, Remote
from elastic.protocol.saves import Upload, UploaderApi
from elastic.worker.known_parts import KnownParts
from elastic.worker.outbox import Outbox
from elastic.worker.save_schedule import SaveSchedule
from trainer.engine.engine import Engine
from trainer.engine.host_copy import Copy, HostBuffer, Share
from trainer.replication.step_commit import Place, Saving

_LISTEN_S = 0.1
"""How often a worker that waits for an upload looks whether it is called away."""

_PATIENCE_S = 60.0
"""How long to try again after an uploader has died with a save."""


class Saver:
    """Copies the share that is due, and has it written while the training goes on.

    Args:
        job: what the run is about.
        identity: this worker's.
        outbox: to the run's records.
        clock: when a checkpoint is wanted.
        leave_now: whether a fault has called this worker away.
    """

    def __init__(
        self,
        job: Job,
        identity: Identity,
        outbox: Outbox,
        clock: SaveSchedule,
        leave_now: Callable[[], bool],
    ) -> None:
        self._leave_now = leave_now
        self._job, self._identity, self._outbox = job, identity, outbox
        self._coordinator = job.coordinator
        self._writing: dict[Place, tuple[threading.Thread, HostBuffer]] = {}
        self._buffers: list[HostBuffer] = []
        self._preparing: threading.Thread | None = None
        self._uploader: Remote[UploaderApi] | None = None
        self._clock = clock
        self._parts = KnownParts()
        self._run_name = {"name": job.paths.root.name, "id": job.identity.id}
        self.hand_in_again: Callable[[], None] | None = None
        """Hands in the latest receipt for the store once more."""

    # -- asked by the loop -------------------------------------------------------------------------

    def saving(self, *, lead: bool) -> Saving:
        """What this worker has to say at a commit. The lead's clock alone counts."""
        busy = frozenset(place for place in self._writing if self._is_busy(place))
        return Saving(wanted=lead and self._clock.wanted(), busy=busy)

    def ask(self, wanted: bool) -> None:
        """Whether a checkpoint is wanted. What is being written may be it."""
        self._clock.ask(wanted and not self._is_busy("store"))

    def lacks_last(self, step: int) -> bool:
        """At the end of the run, before `save`: whether the state before `step` has yet to be
        saved. Waits for what is being written; False as well where a fault calls this worker
        away."""
        return self.wait() and not self._coordinator.call(CoordinatorApi.saved, step)

    def save(
        self,
        run: Run,
        step: int,
        engine: Engine,
        training_state: dict[str, Any],
        places: Sequence[Place],
    ) -> None:
        """Begins to save the state before `step` to `places`. All workers with state call it."""
        places = [place for place in places if not self._is_busy(place)]
        if not places:
            return
        begun_s, workers = time.monotonic(), self._job.train.parallel.workers
        share, buffer = share_of(run, engine), self._free_buffer(run, engine)
        rank = run.position * workers + engine.rank
        begun_at, since_s = time.time(), time.monotonic()
        copy = engine.state.copy_to(buffer, share)
        upload = Upload(
            place="store",
            pid=self._identity.pid,
            fd=buffer.fd,
            number=buffer.number,
            attempt=Attempt(
                rank=rank, step=step, generation=run.generation, attempt=self._job.attempt
            ),
            writers=run.savers * workers,
            slices=share.slices,
            still=share.still,
            training_state={**training_state, "run": self._run_name},
            begun_at=begun_at,
        )
        for place in places:
            self._begin(replace(upload, place=place), buffer, copy, since_s)
        if "store" in places:
            self._clock.saved(held_s=time.monotonic() - begun_s)

    def _begin(self, upload: Upload, buffer: HostBuffer, copy: Copy, since_s: float) -> None:
        thread = threading.Thread(
            target=self._write,
            args=(upload, copy, since_s),
            name=f"save to {upload.place}",
            daemon=True,
        )
        self._writing[upload.place] = thread, buffer
        thread.start()

    def wait(self) -> bool:
        """Waits until whatever is being written is written. Returns False where a fault calls this
        worker away before."""
        for thread, _ in self._writing.values():
            while thread.is_alive():
                if self._leave_now():
                    return False
                thread.join(_LISTEN_S)
        return True

    # -- memory ------------------------------------------------------------------------------------

    def prepare(self, run: Run, engine: Engine) -> None:
        """Makes the memory for copies, and has the node's uploader started, beside the first steps.
        Called at the start of a generation by a worker that has state."""
        if self._preparing is not None and self._preparing.is_alive():
            return  # what it makes is changed where it turns out too small
        size, device = share_of(run, engine).size_bytes, engine.device
        self._preparing = threading.Thread(
            target=self._make_buffers, args=(size, device), name="save memory", daemon=True
        )
        self._preparing.start()
        if self._uploader is None:
            threading.Thread(target=self._find_uploader, name="uploader", daemon=True).start()

    def _find_uploader(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            self._uploader = self._coordinator.call(CoordinatorApi.uploader, self._identity.node)

    def _make_buffers(self, size_bytes: int, device: torch.device) -> None:
        wanted = 1 if self._job.checkpoint.memory_every is None else 2
        used = self._used_buffers()
        small = [b for b in self._buffers if b.size_bytes < size_bytes and b not in used]
        for buffer in small:
            self._buffers.remove(buffer)
            buffer.close()
        while len(self._buffers) < wanted:
            self._buffers.append(HostBuffer(size_bytes, device))

    def _free_buffer(self, run: Run, engine: Engine) -> HostBuffer:
        """A buffer that nobody reads. There is one: no two saves write to one place, and those to
        two places in one step share a copy."""
        self._await_preparation()
        used, size = self._used_buffers(), share_of(run, engine).size_bytes
        free = [b for b in self._buffers if b not in used and b.size_bytes >= size]
        if not free:  # it was in use, and too small for this place, when the generation began
            self._make_buffers(size, engine.device)
            free = [b for b in self._buffers if b not in used and b.size_bytes >= size]
        return free[0]

    def _used_buffers(self) -> list[HostBuffer]:
        return [buffer for place, (_, buffer) in self._writing.items() if self._is_busy(place)]

    def _await_preparation(self) -> None:
        if self._preparing is not None:
            self._preparing.join()

    # -- threads -----------------------------------------------------------------------------------

    def _is_busy(self, place: Place) -> bool:
        return place in self._writing and self._writing[place][0].is_alive()

    def _write(self, upload: Upload, copy: Copy, since_s: float) -> None:
        try:
            copy.wait()
            self._outbox.flush()  # a checkpoint must not count before its steps are in the records
            if upload.place == "store":
                known = self._parts.of(self._coordinator.call(CoordinatorApi.newest_saved))
                upload = replace(upload, known=known)
            written = self._upload(upload)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            report_failure(self._coordinator, upload, reason)
            return
        if written is not None and upload.place == "store":
            self._parts.add(upload.attempt, written.parts)
            # The uploader has handed it in; a coordinator started anew may have to hear it again.
            self.hand_in_again = partial(
                hand_in, self._coordinator, upload, written.receipt, self._identity.node
            )
            self._clock.written(write_s=time.monotonic() - since_s, held_s=copy.held_s)

    def _upload(self, upload: Upload) -> Written | None:
        """Has the node's uploader write; where that dies, the one that takes its place."""
        until_s: float | None = None
        while True:
            uploader = self._uploader or self._coordinator.call(
                CoordinatorApi.uploader, self._identity.node
            )
            self._uploader = uploader
            try:
                return ray.get(uploader.send(UploaderApi.write, upload))
            except ray.exceptions.ActorUnschedulableError:
                if upload.place == "memory":
                    raise  # nor is there anybody who could hand it out
                # Ray starts none on a machine that it drains, where the coordinator was lost,
                # and with it the one that there was. What lies here may be all there is.
                segment_bytes = self._job.checkpoint.segment_bytes
                return write_and_tell(
                    upload, self._coordinator, self._job.paths, self._identity.node, segment_bytes
                )
            except ray.exceptions.RayActorError:
                self._uploader = None
                until_s = until_s or time.monotonic() + _PATIENCE_S
                if time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_S)


def share_of(run: Run, engine: Engine) -> Share:
    """What a worker writes of every save of a generation."""
    return engine.state.share(run.position, run.savers)
