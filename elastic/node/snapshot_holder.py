"""A node's part in snapshots: an actor that keeps them, and how a worker reads what others keep.

The actor stands beside the node's agent and not in it: copying gigabytes must not delay the news
of a death, and the end of this process is not the loss of the node. It holds nothing itself; what
it keeps lies in tmpfs (`checkpointing/snapshots/host_memory.py`) and outlives it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import ray

from checkpointing import (
    CheckpointError,
    CorruptError,
    Manifest,
    Segment,
    StoreUnavailableError,
    hold_room,
    open_memory,
    settle_snapshot,
    sweep_given_up,
    sweep_snapshots,
    take_over,
)
from checkpointing.format.segment import bad_block_of
from elastic.node.helpers import announce
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote, last_line
from elastic.protocol.saves import HeldSnapshot, HolderApi
from elastic.ray_compat.cluster import live_nodes

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Most bytes in one call from node to node."""
CHUNK_TIMEOUT_S = 60.0
"""Bound on one such call, for holders that freeze."""
MOST_CALLS = 32
"""Calls at once in a holder: reads of other nodes, and one copy."""


class SnapshotHolder(HolderApi):
    """Keeps a node's parts of snapshots. The coordinator makes one per node.

    Args:
        coordinator: has it watched.
        folder: the run's `memory_folder`.
        node: Ray's id of this node.
    """

    def __init__(self, coordinator: Remote[CoordinatorApi], folder: Path, node: str) -> None:
        self._folder, self._node = folder, node
        self._take_over()
        announce(coordinator, node, "snapshot holder")

    def copy(self, source: Remote[HolderApi], segments: tuple[Segment, ...]) -> None:
        """Takes segments over from `source`, the holder of another node, and checks them.

        Raises:
            CorruptError: they did not arrive as they were written.
            StoreUnavailableError: there is no room.
        """
        store = open_memory(self._folder, self._node)
        with hold_room(store, sum(segment.size_bytes for segment in segments)) as held:
            for segment in segments:
                held.put(segment.key, _arriving(source, segment))

    def read(self, key: str, start: int, length: int) -> bytes:
        """See HolderApi."""
        return open_memory(self._folder, self._node).get_range(key, start, length)

    def settle(self, manifest: Manifest) -> None:
        """See `settle_snapshot`."""
        settle_snapshot(open_memory(self._folder, self._node), manifest)

    def sweep(self, step: int, generation: int, keep: Manifest | None) -> None:
        """See `sweep_snapshots`. Room is short: Ray may not have known at this holder's start that
        the machine's former node was gone."""
        self._take_over()
        sweep_snapshots(open_memory(self._folder, self._node), step, generation, keep)

    def sweep_given_up(self, step: int, generation: int) -> None:
        """See `sweep_given_up`."""
        sweep_given_up(open_memory(self._folder, self._node), step, generation)

    def _take_over(self) -> None:
        """What nodes that are gone have left on this machine would take room for as long as the run
        goes on: nobody else sweeps it."""
        if all(there.name == self._node for there in self._folder.glob("*")):
            return
        try:
            open_memory(self._folder, self._node)
            take_over(self._folder, frozenset(live_nodes()), self._node)
        except (OSError, CheckpointError, ray.exceptions.RayError) as error:
            log.warning("what nodes that are gone have left in memory stays: %s", error)


class HeldSegments:
    """Reads a snapshot from this node's memory, or else from other nodes'. A RangeSource.

    A source that is gone, or whose bytes fail their CRCs, is passed over for the next one.

    Args:
        held: the snapshot.
        folder: the run's `memory_folder`.
        node: Ray's id of this node.
    """

    def __init__(self, held: HeldSnapshot, folder: Path, node: str) -> None:
        self._held, self._folder, self._node = held, folder, node

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `Store.get_range`; `start` and `length` are whole CRC blocks, but for the end.

        Raises:
            StoreUnavailableError: no source has it unharmed; the text says why of each.
        """
        reasons = []
        sources = self._held.holders[key]
        for node in sorted(sources, key=lambda n: n != self._node):  # this one first
            try:
                data = self._read(node, sources[node], key, start, length)
                _check(self._held.manifest.segments[key], start, start + length, data)
                return data
            except (CheckpointError, ray.exceptions.RayError) as error:
                reasons.append(f"node {node[:8]}: {type(error).__name__}: {last_line(error)}")
                log.warning("%s cannot be read on %s", key, reasons[-1])
        raise StoreUnavailableError(key, None, "; ".join(reasons) or "no node has it")

    def _read(
        self, node: str, holder: Remote[HolderApi], key: str, start: int, length: int
    ) -> bytes:
        if node == self._node:
            return open_memory(self._folder, node).get_range(key, start, length)
        return b"".join(_chunks(holder, key, start, start + length))


def _arriving(source: Remote[HolderApi], segment: Segment) -> Iterator[bytes]:
    """The bytes of a segment on another node, each block checked."""
    step = max(1, CHUNK_BYTES // segment.block_bytes) * segment.block_bytes
    for start in range(0, segment.size_bytes, step):
        stop = min(start + step, segment.size_bytes)
        data = b"".join(_chunks(source, segment.key, start, stop))
        _check(segment, start, stop, data)
        yield data


def _chunks(holder: Remote[HolderApi], key: str, start: int, stop: int) -> Iterator[bytes]:
    for at in range(start, stop, CHUNK_BYTES):
        call = holder.send(HolderApi.read, key, at, min(CHUNK_BYTES, stop - at))
        yield ray.get(call, timeout=CHUNK_TIMEOUT_S)


def _check(segment: Segment, start: int, stop: int, data: bytes) -> None:
    """Raises CorruptError where `data`, the blocks from `start` to `stop`, is short or has a block
    that fails its CRC."""
    if len(data) != stop - start:
        raise CorruptError(segment.key, f"{len(data)} bytes came for {start} to {stop}")
    bad = bad_block_of(segment, start, data)
    if bad is not None:
        raise CorruptError(segment.key, "its CRC32 differs", bad)
