"""The state of a step that no living replica holds: from the nodes' memory, the store, or the seed.

All workers of all replicas restore at once: what replicas share is read once and handed round
(`trainer/recovery/shared_restore.py`). A saved state that cannot be read is given up by all of them
together; the coordinator is told and looks itself, and the next roster goes on from the next best
one, or without who alone could not read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from checkpointing import (
    CheckpointError,
    Keys,
    NotCommittedError,
    Reader,
    S3Config,
    load_manifest,
    open_store,
)
from elastic.node.snapshot_holder import HeldSegments
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.job import Job
from elastic.protocol.messages import Identity, Run
from elastic.protocol.run_identity import check_own
from trainer.engine.engine import Engine
from trainer.loop.link import Progress
from trainer.recovery.shared_restore import Saved, Unreadable, read_together
from trainer.replication.replicas import CrossGroup


def restore(
    job: Job, run: Run, engine: Engine, cross: CrossGroup, identity: Identity
) -> Progress | None:
    """Loads the state of `run.step`, or starts from the seed at step 0.

    Args:
        job: what the run is about.
        run: says where the state is.
        engine: gets it.
        cross: the workers of all replicas with the same part of it.
        identity: this worker's.

    Returns:
        Where the run goes on; None where it cannot be read or a peer is gone: a regroup is due, and
        nothing was loaded.
    """
    if run.step == 0:
        engine.initialize()
        return Progress()
    opens = _open_snapshot if run.source == "memory" else open_checkpoint
    read = read_together(
        engine, cross, partial(open_own, job, engine, opens, run.step, identity.node)
    )
    if isinstance(read, Unreadable):
        # A snapshot may be unreadable because of who is gone: another node may hold it, too.
        if read.error is not None and not (read.peer_gone and run.source == "memory"):
            _tell(job, run, identity.worker, read.error)
        return None
    if read is None:
        return None
    engine.load(read.values, optimizer_steps=read.optimizer_steps)
    return Progress(step=run.step, skipped_in_a_row=read.skipped_in_a_row)


def open_own(
    job: Job, engine: Engine, opens: Callable[[Job, int, str], Saved], step: int, node: str
) -> Saved:
    """Opens a saved state and checks whose it is.

    Raises:
        CheckpointError: it cannot be read, or is of another run or another model.
    """
    reader, state = opens(job, step, node)
    model = {name: part.info for name, part in engine.state.slices().items()}
    check_own(reader.manifest, job.identity, model)
    return reader, state


def open_checkpoint(job: Job, step: int, node: str) -> Saved:
    """The checkpoint of `step` in the store. The others wait in a collective for who reads: from a
    server that does not answer it comes back before that ends, and says what it has met."""
    place = job.paths.checkpoints
    if isinstance(place, S3Config):
        bound_s = 0.9 * job.health.collective_timeout_s
        part_s = min(place.part_timeout_s, bound_s / 2)
        # A last try may begin when the time is up.
        timeout_s = min(place.timeout_s, bound_s - part_s)
        place = replace(place, timeout_s=timeout_s, part_timeout_s=part_s)
    store = open_store(place)
    manifest = load_manifest(store, Keys(), step)
    return Reader(store, manifest), manifest.training_state


def _open_snapshot(job: Job, step: int, node: str) -> Saved:
    held = job.coordinator.call(CoordinatorApi.snapshot, step)
    if held is None:
        raise NotCommittedError(step, "the nodes that held the snapshot are gone")
    segments = HeldSegments(held, job.paths.memory, node)
    return Reader(segments, held.manifest), held.manifest.training_state


def _tell(job: Job, run: Run, worker: str, error: CheckpointError) -> None:
    """Returns when the coordinator goes by it, so that the next roster is given another state."""
    coordinator = job.coordinator
    if run.source == "memory":
        coordinator.call(CoordinatorApi.snapshot_failed, run.step, run.generation, str(error))
    else:
        coordinator.call(CoordinatorApi.checkpoint_failed, worker, run.step, run.generation, error)
