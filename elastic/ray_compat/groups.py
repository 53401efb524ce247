"""The placement groups of a run: each holds one replica's workers, or one spare."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from elastic.errors import ResourcesError
from elastic.ray_compat.cluster import end_actors
from elastic.ray_compat.kept import forget
from elastic.ray_compat.placement import (
    START_PATIENCE_S,
    GroupState,
    StartDecision,
    decide_start,
)

log = logging.getLogger(__name__)

_LEAST_WAIT_S = 1
"""Ray waits for whole seconds, and says False to less even where the group is placed."""
_LOOK_S = 0.5
"""How often it is looked whether what is asked for in one piece is there."""


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
        least: workers of the smallest layout.
        wait_s: how long a start waits for them.
        is_over: whether the run has ended, and waits for nothing any more.
    """

    def __init__(
        self,
        prefix: str,
        bundle: dict[str, float],
        *,
        least: int,
        wait_s: float,
        is_over: Callable[[], bool],
    ) -> None:
        self._prefix, self._bundle = prefix, bundle
        self._least, self._wait_s, self._is_over = least, wait_s, is_over
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
        """Waits until the run can start, as `decide_start` has it. The room that its driver saw may
        be another run's by now: then all are given back, and what the run needs is asked for in one
        piece (`Demand`), until it is there. Groups that are pending when the run starts are given
        up: Ray counts a machine for some time after it has gone, so there may be fewer than it
        said.

        Args:
            timeout_seconds: Ray Train's own patience, which holds where `wait_s` is shorter.

        Returns:
            True.

        Raises:
            ResourcesError: the smallest layout was not placed in that time, or the run is over. All
                are given back.
        """
        wait_s = max(timeout_seconds, self._wait_s)
        deadline = time.monotonic() + wait_s
        sizes = [held.size for held in self._held.values()]
        while (decision := self._await_start(deadline)) == "give_back":
            self.shutdown()
            self._await_room(deadline)
            for size in sizes:  # at once: Ray tries new ones before those that wait
                self.ask(size)
        if decision == "give_up":
            self.shutdown()
            raise ResourcesError(
                f"{self._least} workers with {self._each} each",
                "the room that there was is taken, or its machine has gone",
                wait_s,
                "Add nodes, end what has them, or raise scaling.wait_s",
            )
        for name in [name for name, held in self._held.items() if not held.placed]:
            self.remove(name)
        return True

    def _await_start(self, deadline: float) -> StartDecision:
        """Waits for what `decide_start` decides, where that is not to wait."""
        begun_s = placed_s = time.monotonic()
        told = False
        while True:
            before = self._placed
            self._look_at_all()
            placed, now_s = self._placed, time.monotonic()
            if self._is_over():
                return "give_up"
            if placed > before:
                placed_s = now_s
            decision = decide_start(
                placed=placed,
                least=self._least,
                whole=all(held.placed for held in self._held.values()),
                since_s=now_s - placed_s,
                left_s=deadline - now_s,
            )
            if placed < self._least and not told and now_s - begun_s >= START_PATIENCE_S:
                told = True
                log.warning(
                    "the room that there was is taken, or its machine has gone: %d of the %d "
                    "workers of the smallest layout are placed, with %s each. The run waits for "
                    "it, %.0f s at most (scaling.wait_s)",
                    placed,
                    self._least,
                    self._each,
                    max(0.0, deadline - now_s),
                )
            if decision != "wait":
                return decision
            next(h for h in self._held.values() if not h.placed).group.wait(_LEAST_WAIT_S)

    def _await_room(self, deadline: float) -> None:
        """Waits until what the smallest layout needs is free at once; no longer than the run."""
        demand = Demand([self._bundle] * self._least)
        demand.ask()
        try:
            while not (demand.placed() or self._is_over() or time.monotonic() > deadline):
                time.sleep(_LOOK_S)
        finally:
            demand.withdraw()

    def _look_at_all(self) -> None:
        """Asks Ray which groups are placed, in one call for all."""
        created = {row["name"] for row in _groups_of(self._prefix) if row["state"] == "CREATED"}
        for name, held in self._held.items():
            held.placed = name in created

    @property
    def _placed(self) -> int:
        """Workers of the groups that were placed at the last look."""
        return sum(held.size for held in self._held.values() if held.placed)

    @property
    def _each(self) -> str:
        """Resources of a worker, in words."""
        return ", ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())

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

    def ask(self) -> None:
        """Asks, where it does not yet."""
        if self._group is None:
            self._group = placement_group(self._bundles, strategy="PACK")

    def placed(self) -> list[dict[str, float]]:
        """The workers' resources that Ray has placed for it: all or none. They count as taken, and
        are free for this process once it withdraws."""
        if self._group is None or placement_group_table(self._group).get("state") != "CREATED":
            return []
        return self._bundles

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
