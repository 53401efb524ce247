"""A node's writer of checkpoints and snapshots: an actor with a life of its own.

A worker copies its share of the state into memory that this process opens
(`trainer/engine/host_copy.py`), and goes on training. Checksums, segments and uploads are made
here, so they take neither the worker's interpreter nor, where the worker dies, the save along:

    worker    copy ──► write(Upload) ──► trains on, or dies
    uploader  opens the memory, writes the segments, hands the receipt to the coordinator

It holds nothing from one call to the next: the worker says what of its part is in the store already
(`checkpointing/write/incremental.py`). Where its process ends, Ray starts another, and the worker
asks that one the same again. It imports no torch.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, wait
from functools import partial

from checkpointing import (
    Attempt,
    Keys,
    Receipt,
    Written,
    hold_room,
    open_memory,
    open_store,
    write_changed,
    write_shared,
)
from elastic.node.helpers import announce
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.saves import Upload, UploaderApi
from trainer.engine.shared_copy import CopyGoneError, check_copy, open_copy
from trainer.replication.step_commit import Place

log = logging.getLogger(__name__)

_Part = tuple[Place, int, int, Attempt]
"""What tells the parts of saves apart: place, process and number of the copy, and who writes."""

MOST_CALLS = 64
"""Writes at once: two for each worker of a node, and those of workers that are gone."""

NICENESS = 10
"""Where training and uploads want the same core, the training gets it."""


class Uploader(UploaderApi):
    """Writes what the workers of a node have copied. The coordinator makes one per node.

    Args:
        coordinator: gets the receipts.
        paths: where checkpoints and snapshots go.
        node: Ray's id of this node.
        segment_bytes: bound on the tensor bytes in one file.
    """

    def __init__(
        self,
        coordinator: Remote[CoordinatorApi],
        paths: RunPaths,
        node: str,
        segment_bytes: int,
    ) -> None:
        self._coordinator, self._paths = coordinator, paths
        self._node, self._segment_bytes = node, segment_bytes
        self._lock, self._writing = threading.Lock(), dict[_Part, Future[Written | None]]()
        os.nice(NICENESS)
        announce(coordinator, node, "uploader")

    def write(self, upload: Upload) -> Written | None:
        """See UploaderApi."""
        part = upload.place, upload.pid, upload.number, upload.attempt
        with self._lock:
            if (begun := self._writing.get(part)) is None:
                mine = self._writing[part] = Future[Written | None]()
        if begun is not None:
            return begun.result()
        try:
            mine.set_result(self._write(upload))
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with self._lock:
                del self._writing[part]
        return mine.result()

    def finish(self) -> None:
        """Waits until what is being written now is written, or could not be."""
        with self._lock:
            begun = [*self._writing.values()]
        wait(begun)

    def _write(self, upload: Upload) -> Written | None:
        segment_bytes = self._segment_bytes
        return write_and_tell(upload, self._coordinator, self._paths, self._node, segment_bytes)


def write_and_tell(
    upload: Upload,
    coordinator: Remote[CoordinatorApi],
    paths: RunPaths,
    node: str,
    segment_bytes: int,
) -> Written | None:
    """Writes a part, and hands in its receipt or says why there is none.

    Args:
        upload: it.
        coordinator: is told.
        paths: see `write_part`, as for the others.
        node: see there.
        segment_bytes: see there.

    Returns:
        See `Uploader.write`.
    """
    try:
        written = write_part(upload, paths, node, segment_bytes)
    except CopyGoneError as error:
        log.warning("step %d is not saved: %s", upload.attempt.step, error)
        return None  # the worker died, or has given up: nobody waits for this
    except Exception as error:
        report_failure(coordinator, upload, f"{type(error).__name__}: {error}")
        return None
    hand_in(coordinator, upload, written.receipt, node)
    return written


def write_part(upload: Upload, paths: RunPaths, node: str, segment_bytes: int) -> Written:
    """Writes a part and tells nobody.

    Args:
        upload: it.
        paths: where checkpoints and snapshots go.
        node: Ray's id of this node.
        segment_bytes: bound on the tensor bytes in one file.

    Raises:
        CopyGoneError: the copy is gone.
        CheckpointError: it could not be written.
    """
    with open_copy(upload.pid, upload.fd, upload.number) as memory:
        what = upload.attempt, upload.slices, memory
        check = partial(check_copy, memory, upload.pid, upload.number)
        if upload.place == "store":
            return write_changed(
                open_store(paths.checkpoints),
                Keys(),
                *what,
                known=upload.known,
                still=upload.still,
                segment_bytes=segment_bytes,
                check=check,
            )
        with hold_room(open_memory(paths.memory, node), len(memory)) as store:
            receipt = write_shared(
                store,
                Keys(),
                *what,
                segment_bytes=segment_bytes,
                # Holders hand whole blocks round: they check them, and pass over bad ones.
                piece_bytes=None,
                check=check,
            )
        return Written(receipt=receipt, parts={})


def hand_in(
    coordinator: Remote[CoordinatorApi], upload: Upload, receipt: Receipt, node: str
) -> None:
    """Tells the coordinator that a part is written."""
    state, begun_at, writers = upload.training_state, upload.begun_at, upload.writers
    if upload.place == "store":
        coordinator.call(CoordinatorApi.receipt, receipt, state, begun_at, writers)
    else:
        coordinator.call(CoordinatorApi.snapshot_part, receipt, state, node, begun_at, writers)


def report_failure(coordinator: Remote[CoordinatorApi], upload: Upload, reason: str) -> None:
    """Tells the coordinator that a part of a save will not be there."""
    step, generation = upload.attempt.step, upload.attempt.generation
    if upload.place == "store":
        coordinator.call(CoordinatorApi.save_failed, step, generation, reason)
    else:
        coordinator.call(CoordinatorApi.snapshot_skipped, step, generation, reason)
