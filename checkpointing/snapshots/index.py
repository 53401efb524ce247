"""Snapshots: checkpoints that lie in the memory of the nodes. Which are whole, and who holds what.

Pure. A snapshot has the form of a checkpoint: segments with CRCs, and a manifest over them. Each
segment lies in the memory of the node that wrote it and of one other node; `host_memory.py` is the
place, a folder that outlives every process of its node. A snapshot can be read while each of its
segments has a live holder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from checkpointing.format.manifest import Manifest, Receipt
from checkpointing.snapshots.host_memory import Stock
from checkpointing.write.publish import build_manifest


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A complete snapshot."""

    manifest: Manifest
    """What it holds."""
    places: Mapping[str, frozenset[str]]
    """Segment key -> nodes that have it."""

    @property
    def step(self) -> int:
        """The step that the state belongs to."""
        return self.manifest.step

    @property
    def nodes(self) -> frozenset[str]:
        """Every node that has a part of it."""
        return frozenset(node for nodes in self.places.values() for node in nodes)

    @property
    def copies(self) -> int:
        """On how many nodes each segment lies at least."""
        return min((len(nodes) for nodes in self.places.values()), default=0)

    @property
    def size_bytes(self) -> int:
        """Size of one copy."""
        return sum(segment.size_bytes for segment in self.manifest.segments.values())

    def readable(self, live: AbstractSet[str]) -> bool:
        """Whether every segment has a holder among the nodes `live`."""
        return all(nodes & live for nodes in self.places.values())


class SnapshotIndex:
    """From the parts of the saving workers to the newest complete snapshot. In memory.

    Args:
        versions: library versions, kept in every manifest.
        found: a snapshot that an earlier start of the run has left.
    """

    def __init__(self, *, versions: Mapping[str, str], found: Snapshot | None = None) -> None:
        self._versions = versions
        self._parts: dict[tuple[int, int], dict[int, tuple[Receipt, frozenset[str]]]] = {}
        self._oldest_generation = 0
        self._swept: dict[int, int] = {}
        """Generation -> step up to which nothing of it, or of earlier ones, becomes complete."""
        self.whole: Snapshot | None = found
        """The newest complete snapshot, whether or not its holders live."""

    def add(
        self,
        receipt: Receipt,
        training_state: Mapping[str, Any],
        nodes: Iterable[str],
        writers: int,
    ) -> Snapshot | None:
        """Takes one of `writers` parts, which lies on `nodes`. Returns the snapshot where this
        completed a newer one.

        Raises:
            SliceError, NotCommittedError: the parts do not make a state, see `build_manifest`.
        """
        attempt = (receipt.step, receipt.generation)
        if receipt.generation < self._oldest_generation or not self._is_newer(receipt.step):
            return None
        if self._is_swept(receipt):
            return None
        parts = self._parts.setdefault(attempt, {})
        parts[receipt.rank] = (receipt, frozenset(nodes))
        if len(parts) < writers:
            return None
        self._parts = {a: p for a, p in self._parts.items() if a[0] > receipt.step}
        manifest = build_manifest(
            step=receipt.step,
            generation=receipt.generation,
            receipts=[part for part, _ in parts.values()],
            training_state=training_state,
            versions=self._versions,
        )
        places = {s.key: where for part, where in parts.values() for s in part.segments}
        self.whole = Snapshot(manifest=manifest, places=places)
        return self.whole

    def newest(self, live: AbstractSet[str]) -> Snapshot | None:
        """The newest snapshot that the nodes `live` hold all of."""
        return self.whole if self.whole is not None and self.whole.readable(live) else None

    def forget(self) -> None:
        """The complete snapshot turned out to be unreadable."""
        self.whole = None

    def swept(self, step: int, generation: int) -> None:
        """What generations up to `generation` wrote of steps up to `step` is being deleted, but for
        the complete snapshot: parts that are still to come make nothing whole of it."""
        self._swept = {g: s for g, s in self._swept.items() if g > generation or s > step}
        self._swept[generation] = max(step, self._swept.get(generation, 0))

    def went_back(self, step: int, generation: int) -> None:
        """From `generation` on the run does the steps after `step` again.

        Parts of earlier generations no longer count: they may be ahead of the run's records.
        """
        self._oldest_generation = generation
        self._parts.clear()
        self._swept.clear()
        if self.whole is not None and self.whole.step > step:
            self.whole = None

    def _is_newer(self, step: int) -> bool:
        return self.whole is None or step > self.whole.step

    def _is_swept(self, receipt: Receipt) -> bool:
        return any(
            receipt.step <= step and receipt.generation <= generation
            for generation, step in self._swept.items()
        )


def plan_other_node(node: str, live: Collection[str]) -> str | None:
    """The node that keeps the copy of what `node` holds: the next one in the ring of `live` nodes.

    None where there is no other.
    """
    others = sorted(set(live) - {node})
    return next((other for other in others if other > node), others[0]) if others else None


def find_newest(
    stocks: Mapping[str, Stock], went_back: Iterable[tuple[int, int]] = ()
) -> Snapshot | None:
    """The newest snapshot of which every segment is there.

    Args:
        stocks: node -> what lies in its memory.
        went_back: (generation, step) of each time that the run went back to `step`: what earlier
            generations took after it is no longer part of the run.
    """
    returns = tuple(went_back)
    found = {
        (m.step, m.generation): m
        for stock in stocks.values()
        for m in stock.manifests
        if not any(m.generation < generation and m.step > step for generation, step in returns)
    }
    snapshots = (_locate(found[key], stocks) for key in sorted(found, reverse=True))
    return next((s for s in snapshots if s.readable(stocks.keys())), None)


def _locate(manifest: Manifest, stocks: Mapping[str, Stock]) -> Snapshot:
    return Snapshot(
        manifest=manifest,
        places={
            key: frozenset(n for n, stock in stocks.items() if stock.has(key, segment.size_bytes))
            for key, segment in manifest.segments.items()
        },
    )
