"""The state of a step that no living replica holds: from the nodes' memory, the store, or the seed.

All workers of all replicas restore at once, each its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from checkpointing import (
    CheckpointError,
    Keys,
    NotCommittedError,
    Reader,
    load_manifest,
    open_store,
)
from elastic.ask import ask
from elastic.job import Job
from elastic.messages import Run
from elastic.nodes.snapshot_holder import HeldSegments
from trainer.engine import Engine
from trainer.link import Progress

State = tuple[dict[str, torch.Tensor], Mapping[str, Any]]
"""A worker's tensors by name, and the training state beside them."""


def restore(job: Job, run: Run, engine: Engine, node: str) -> Progress | None:
    """Loads the state of `run.step`, or starts from the seed at step 0.

    Args:
        job: what the run is about.
        run: says where the state is.
        engine: gets it.
        node: this worker's.

    Returns:
        Where the run goes on; None where a worker of the replica cannot read its part of a
        snapshot: then nobody takes it.
    """
    if run.step == 0:
        engine.initialize()
        return Progress()
    if run.source == "memory":
        read = _read_snapshot(job, run.step, engine, node)
        if engine.sum_in_replica([float(read is None)])[0] > 0 or read is None:
            return None
    else:
        read = _read_checkpoint(job, run.step, engine)
    values, state = read
    engine.load(values, optimizer_steps=int(state["optimizer_steps"]))
    return Progress(step=run.step, skipped_in_a_row=int(state["skipped_in_a_row"]))


def _read_checkpoint(job: Job, step: int, engine: Engine) -> State:
    store = open_store(job.paths.checkpoints)
    manifest = load_manifest(store, Keys(), step)
    return engine.state.read(Reader(store, manifest)), manifest.training_state


def _read_snapshot(job: Job, step: int, engine: Engine, node: str) -> State | None:
    """This worker's part of a snapshot in the nodes' memory; None, and the coordinator knows that
    it does not count any more, where it cannot be read."""
    try:
        held = ask(job.coordinator.snapshot, step)
        if held is None:
            raise NotCommittedError(step, "the nodes that held the snapshot are gone")
        segments = HeldSegments(held, job.paths.memory, node)
        return engine.state.read(Reader(segments, held.manifest)), held.manifest.training_state
    except CheckpointError as error:
        ask(job.coordinator.snapshot_failed, step, str(error))
        return None
