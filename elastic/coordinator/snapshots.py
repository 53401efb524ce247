"""The coordinator's part in snapshots: takes in their parts, has them copied, knows the newest.

    a saving worker writes its slices to its node's tmpfs ──► take
         ──► the holder of another node copies them ──► all parts are there
         ──► holders write the commit record and delete the snapshot before it

Nothing of this waits for a step, and no step waits for it. Whatever fails on the way costs this
snapshot and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import ray

from checkpointing import Manifest, Receipt, Snapshot, SnapshotIndex, plan_other_node
from elastic.coordinator.own_handle import own_handle
from elastic.membership.progress import Progress
from elastic.node.snapshot_holder import MOST_CALLS, SnapshotHolder
from elastic.node.snapshot_survey import find_snapshot
from elastic.protocol import events
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.saves import HeldSnapshot
from elastic.ray_compat.cluster import start_actor

log = logging.getLogger(__name__)

_SURVEY_S = 10.0
"""How long a coordinator that was started anew waits for what the nodes' memory holds: each starts
a process to tell, and the run decides nothing meanwhile."""

_Args = ParamSpec("_Args")


class Snapshots:
    """The run's snapshots. All methods run on the coordinator's event loop.

    Args:
        paths: the run directory, after which the folders in memory are named.
        progress: told of the newest snapshot that can be read.
        start_holder: starts the snapshot holder of a node. Returns its handle.
        note: writes an event down.
        versions: library versions.
        found: what an earlier start has left.
        timeout_s: bound on a call to a holder, for holders that freeze.
    """

    def __init__(
        self,
        paths: RunPaths,
        progress: Progress,
        start_holder: Callable[[str], Remote[SnapshotHolder]],
        note: Callable[[events.Event], None],
        *,
        versions: Mapping[str, str],
        found: Snapshot | None,
        timeout_s: float,
    ) -> None:
        self._paths, self._progress, self._note = paths, progress, note
        self._start_holder = start_holder
        self._versions, self._timeout_s = versions, timeout_s
        self._nodes: set[str] = set()
        self._holders: dict[str, Remote[SnapshotHolder]] = {}
        self._copying: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._sweeping = asyncio.Lock()
        self._skipped = set[tuple[int, int]]()
        """Step and generation of snapshots that are known not to be."""
        self._littered = set[tuple[int, int]]()
        """Those of them of which parts may lie about since the nodes last made room."""
        self._begin(found)

    async def look_again(self) -> None:
        """The coordinator was started anew: goes on from what the nodes say, within `_SURVEY_S`,
        that their memory holds."""
        try:
            found = await asyncio.to_thread(find_snapshot, self._paths, timeout_s=_SURVEY_S)
        except (ray.exceptions.RayError, OSError) as error:
            log.warning("what the nodes' memory holds is not known: %s", error)
            return
        self._begin(found)

    def _begin(self, found: Snapshot | None) -> None:
        self._index = SnapshotIndex(versions=self._versions, found=found)
        self._nodes |= set() if found is None else found.nodes
        self._update()

    # -- nodes -------------------------------------------------------------------------------------

    def node_joined(self, node: str) -> None:
        """A worker runs on `node`: it can hold parts. A node that comes back has what it had."""
        self._nodes.add(node)
        self._holder(node)  # starts while the workers build
        self._update()

    def node_lost(self, node: str) -> None:
        """A node is gone, and what it held."""
        self._nodes.discard(node)
        self._holders.pop(node, None)
        self._update()

    # -- writing -----------------------------------------------------------------------------------

    async def take(
        self,
        receipt: Receipt,
        training_state: Mapping[str, Any],
        node: str,
        started: float,
        writers: int,
    ) -> None:
        """One of `writers` parts is written to the memory of `node`; returns when the part has its
        copy and, if it was the last one, the snapshot counts."""
        progress = self._progress
        void = progress.is_void(receipt.generation)
        if void or progress.ahead(receipt.step, receipt.generation):
            return
        other = plan_other_node(node, self._nodes)
        nodes = {node}
        if other is not None and await self._copy(node, other, receipt):
            nodes.add(other)
        before = self._index.whole
        snapshot = self._index.add(receipt, training_state, nodes, writers)
        if snapshot is None:
            return
        self._update()
        now = time.time()
        self._note(
            events.SnapshotTaken(
                time=now,
                step=snapshot.step,
                generation=snapshot.manifest.generation,
                bytes=snapshot.size_bytes,
                copies=snapshot.copies,
                seconds=now - started,
            )
        )
        holders = snapshot.nodes | (before.nodes if before is not None else set())
        await self._on_all(holders, SnapshotHolder.settle, snapshot.manifest)

    async def skipped(self, step: int, generation: int, reason: str) -> None:
        """A part could not be written: the snapshot of `step`, by the roster of `generation`, will
        not be. Makes room again. Where thousands say so, it is one event, and one call to each node
        serves all who wait for it."""
        if self._progress.is_void(generation):
            return
        snapshot = (step, generation)
        if snapshot not in self._skipped:
            self._skipped.add(snapshot)
            self._note(events.SnapshotSkipped(time=time.time(), step=step, reason=reason))
        self._index.swept(step, generation)
        self._littered.add(snapshot)
        async with self._sweeping:
            if snapshot in self._littered:
                self._littered.discard(snapshot)
                kept = self._kept()
                await self._on_all(self._nodes, SnapshotHolder.sweep, step, generation, kept)

    async def _copy(self, node: str, other: str, receipt: Receipt) -> bool:
        async with self._copying[other]:  # two nodes full of copies of each other would both wait
            return await self._call(
                other, SnapshotHolder.copy, self._holder(node), receipt.segments
            )

    # -- reading -----------------------------------------------------------------------------------

    def find(self, step: int) -> HeldSnapshot | None:
        """The snapshot of `step` and its holders; None where it is not to be had any more."""
        snapshot = self._index.newest(self._nodes)
        if snapshot is None or snapshot.step != step:
            return None
        return HeldSnapshot(
            manifest=snapshot.manifest,
            holders={
                key: {node: self._holder(node) for node in nodes & self._nodes}
                for key, nodes in snapshot.places.items()
            },
        )

    async def failed(self, step: int, generation: int, reason: str) -> None:
        """A worker of the roster of `generation` could not read the snapshot of `step`: from now on
        it does not count. Several may say so, and it is one event. Nothing follows of what an
        earlier roster's worker says late: by now the run may have taken that step's anew."""
        whole = self._index.whole
        if generation != self._progress.generation or whole is None or whole.step != step:
            return
        self._note(events.SnapshotFailed(time=time.time(), step=step, reason=reason))
        self._index.forget()
        self._update()
        taken_in = whole.manifest.generation
        await self._on_all(self._nodes, SnapshotHolder.sweep, step, taken_in, None)

    def went_back(self, step: int, generation: int) -> None:
        """See `SnapshotIndex.went_back`."""
        self._index.went_back(step, generation)
        self._update()

    async def sweep_given_up(self, step: int, generation: int) -> None:
        """From the roster of `generation` on the run does the steps after `step` again: what the
        nodes hold of them goes, to make room."""
        await self._on_all(self._nodes, SnapshotHolder.sweep_given_up, step, generation)

    # -- helpers -----------------------------------------------------------------------------------

    def _update(self) -> None:
        newest = self._index.newest(self._nodes)
        self._progress.snapshotted(0 if newest is None else newest.step)

    def _kept(self) -> Manifest | None:
        return None if self._index.whole is None else self._index.whole.manifest

    def _holder(self, node: str) -> Remote[SnapshotHolder]:
        if node not in self._holders:
            self._holders[node] = self._start_holder(node)
        return self._holders[node]

    async def _on_all(
        self,
        nodes: Iterable[str],
        method: Callable[Concatenate[SnapshotHolder, _Args], None],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> None:
        live = [node for node in nodes if node in self._nodes]
        if not live:
            return
        try:
            # A manifest may take tens of megabytes: one copy serves all nodes.
            once: Any = [ray.put(arg) if isinstance(arg, Manifest) else arg for arg in args]
        except ray.exceptions.RayError as error:  # the object store is full, say
            log.warning("%s is not asked of nodes %s: %s", method.__name__, live, error)
            return
        await asyncio.gather(*(self._call(node, method, *once, **kwargs) for node in live))

    async def _call(
        self,
        node: str,
        method: Callable[Concatenate[SnapshotHolder, _Args], None],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> bool:
        """Calls a holder. Returns whether it did what was asked."""
        try:
            call = self._holder(node).send(method, *args, **kwargs)
            await asyncio.wait_for(call, self._timeout_s)
        except Exception as error:
            log.warning("%s on the snapshot holder of node %s: %s", method.__name__, node, error)
            if isinstance(error, ray.exceptions.RayActorError):
                self._holders.pop(node, None)  # the next call starts another one
            elif isinstance(error, ray.exceptions.ActorUnschedulableError):
                self.node_lost(node)  # it is gone, or Ray drains it
            return False
        return True


def start_holder(folder: Path, node: str) -> Remote[SnapshotHolder]:
    """Starts the snapshot holder of `node`. Called within the coordinator, which has it watched.

    Args:
        folder: the run's `memory_folder`.
        node: Ray's id of the node.

    Returns:
        The holder's handle.
    """
    start = start_actor(SnapshotHolder, node=node, max_concurrency=MOST_CALLS)
    return start(own_handle(), folder, node)
