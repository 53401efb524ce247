"""The placement groups of a run: each holds one replica's workers, or one spare."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from elastic.ray_compat.cluster import end_actors
from elastic.ray_compat.kept import forget
from elastic.ray_compat.placement import GroupState

START_PATIENCE_S = 5.0
"""How long a start waits for further machines once it has some. Free ones are reserved at once."""

_LEAST_WAIT_S = 1
"""Ray waits for whole seconds, and says False to less even where the group is placed."""


@dataclass(kw_only=True)
class _Held:
    group: PlacementGroup
    size: int
    placed: bool = False


class PlacementGroups:
    """All that a run holds. Stands where Ray Train keeps its one placement group's handle.

    Args:
        prefix: the groups' names begin with it; nobody else's do.
        bundle: resources of one worker.
    """

    def __init__(self, prefix: str, bundle: dict[str, float]) -> None:
        self._prefix, self._bundle = prefix, bundle
        self._held: dict[str, _Held] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """(name, size) of each."""
        return iter([(name, held.size) for name, held in self._held.items()])

    def __getitem__(self, name: str) -> PlacementGroup:
        return self._held[name].group

    def ask(self, size: int, *, on_one_node: bool = False) -> None:
        """Asks for a group of `size` workers, on as few nodes as there is room on, or `on_one_node`
        alone. Returns at once: Ray places it when it can."""
        name = f"{self._prefix}{secrets.token_hex(4)}"
        strategy = "STRICT_PACK" if on_one_node else "PACK"
        group = placement_group(
            [self._bundle] * size, strategy=strategy, name=name, lifetime="detached"
        )
        self._held[name] = _Held(group=group, size=size)

    def remove(self, name: str) -> None:
        """Gives a group back, and what runs in it."""
        remove_placement_group(self._held.pop(name).group)

    def look(self, name: str) -> tuple[GroupState, dict[int, str]]:
        """Asks Ray for a group's state, and for the nodes of its placed bundles."""
        held = self._held[name]
        row = placement_group_table(held.group)
        if row.get("state") == "CREATED":
            held.placed = True
            return "placed", row["bundles_to_node_id"]
        return "lost" if held.placed else "pending", row.get("bundles_to_node_id", {})

    def take_up(self) -> bool:
        """Holds the groups that another process, which is gone, has asked for under this prefix.
        Returns whether there are any."""
        for row in _groups_of(self._prefix):
            self._held[row["name"]] = _Held(
                group=_group_of(row),
                size=len(row["bundles"]),
                placed=row["state"] in ("CREATED", "RESCHEDULING"),
            )
        return bool(self._held)

    # -- what Ray Train asks of a handle -----------------------------------------------------------

    @property
    def placement_group(self) -> PlacementGroup:
        """The first one."""
        return next(iter(self._held.values())).group

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until the run can start: all are placed, or some are and no other was for
        `START_PATIENCE_S`. Those that are still pending are given up then: Ray counts a machine for
        some time after it has gone, so there may be fewer than it said.

        Returns:
            False where none was placed within the time.
        """
        pending = dict(self._held)
        deadline = time.monotonic() + timeout_seconds
        while pending and time.monotonic() < deadline:
            placed = [name for name, held in pending.items() if held.group.wait(_LEAST_WAIT_S)]
            for name in placed:
                pending.pop(name).placed = True
                deadline = time.monotonic() + START_PATIENCE_S
        if len(pending) == len(self._held):
            return False
        for name in pending:
            self.remove(name)
        return True

    def shutdown(self) -> None:
        """Gives all back."""
        for name in list(self._held):
            self.remove(name)


class Demand:
    """What a process waits for, as a placement group of its own: Ray's autoscaler reads pending
    groups, and brings nothing to a process that only looks at what is free.

    It is placed whole or not at all, so that nobody lacks what it has while it waits, and ends with
    the process, however that ends. (`request_resources` would replace what others have requested,
    and outlive the process.)

    Args:
        bundles: resources of each worker.
    """

    def __init__(self, bundles: list[dict[str, float]]) -> None:
        self._bundles = bundles
        self._group: PlacementGroup | None = None

    def renew(self) -> None:
        """Asks where nothing is asked for. Gives back what Ray has placed, for the run to take."""
        if self._group is None:
            self._group = placement_group(self._bundles, strategy="PACK")
        elif placement_group_table(self._group).get("state") == "CREATED":
            self.withdraw()

    @property
    def holds(self) -> bool:
        """Whether it asks, and so may have, what others then do not see."""
        return self._group is not None

    def withdraw(self) -> None:
        """Asks for nothing any more."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def end_all(prefix: str) -> None:
    """Leaves nothing on the cluster whose name begins with `prefix`: actors, placement groups and
    what is kept for them. The actor that this process is stays."""
    end_actors(prefix)
    for row in _groups_of(prefix):
        remove_placement_group(_group_of(row))
    forget(prefix)


def _groups_of(prefix: str) -> list[dict[str, Any]]:
    return [
        row
        for row in placement_group_table().values()
        if row["name"].startswith(prefix) and row["state"] != "REMOVED"
    ]


def _group_of(row: dict[str, Any]) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID.from_hex(row["placement_group_id"]))
