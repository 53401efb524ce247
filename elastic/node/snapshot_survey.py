"""What a run has in the memory of the nodes: for the driver, what an earlier start has left; for a
coordinator that was started anew, what it must know; for the supervisor, what nobody needs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from checkpointing import (
    CheckpointError,
    Snapshot,
    Stock,
    clear_memory,
    find_newest,
    take_stock,
)
from elastic.protocol.events import RegroupDone, RunEnded, SnapshotSkipped, SnapshotTaken
from elastic.protocol.run_identity import RunIdentity, newest_own
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.cluster import live_nodes, on_every_node
from elastic.reporting.event_log import last_event, read_events

log = logging.getLogger(__name__)

SURVEY_TIMEOUT_S = 60.0
"""Bound on the answers of the nodes; those that do not answer hold nothing."""


def find_snapshot(paths: RunPaths, *, timeout_s: float = SURVEY_TIMEOUT_S) -> Snapshot | None:
    """The newest complete snapshot of the run that the live nodes hold between them, as they say
    within `timeout_s`.

    A run without records is a new one: what lies under its name is not its own. Needs a Ray
    cluster. Damaged records are passed over: others say so where it matters.
    """
    if not paths.events.exists():
        return None
    stocks = on_every_node(
        _take_stock, str(paths.memory), frozenset(live_nodes()), timeout_s=timeout_s
    )
    went_back = [
        (event.generation, event.step)
        for event in read_events(paths.events, kinds=[RegroupDone], lenient=True)
        if isinstance(event, RegroupDone) and event.outcome in ("start", "restore")
    ]
    return find_newest(stocks, went_back)


def end_is_stored(paths: RunPaths, identity: RunIdentity) -> bool:
    """Whether the run has ended well, by its records, and a checkpoint holds that end: nobody needs
    its snapshots any more. A run that is stopped where nobody has state saves nothing."""
    ended = last_event(paths.events)
    if not isinstance(ended, RunEnded) or ended.outcome not in ("finished", "stopped"):
        return False
    try:
        stored, _ = newest_own(paths, identity)
    except CheckpointError as error:
        log.warning("the snapshots stay in the nodes' memory: %s", error)
        return False
    return stored is not None and stored.step >= ended.step


def has_kept_snapshots(paths: RunPaths) -> bool:
    """Whether some start of the run kept snapshots, by those of its records that can be read."""
    return bool(read_events(paths.events, kinds=[SnapshotTaken, SnapshotSkipped], lenient=True))


Cleared = Literal["none", "deleted", "left"]
"""What a node had of a run's snapshots and has no more; `left`: some could not be deleted."""


def clear_snapshots(paths: RunPaths) -> dict[str, Cleared]:
    """Deletes all snapshots of the run on all live nodes. Needs a Ray cluster. Returns what became
    of them on the nodes that have answered."""
    return on_every_node(_clear, str(paths.memory), timeout_s=SURVEY_TIMEOUT_S)


def _take_stock(folder: str, live: frozenset[str], node: str) -> Stock:
    return take_stock(Path(folder), live, node)


def _clear(folder: str, node: str) -> Cleared:
    there = Path(folder)
    if not there.exists():
        return "none"
    clear_memory(there)
    return "left" if there.exists() else "deleted"
