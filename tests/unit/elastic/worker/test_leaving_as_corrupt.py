"""What a worker does about states and gradients that differ: who leaves, who tells, who goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.worker.disputes import CORRUPT_EXIT_CODE, Disputes


class LeftError(Exception):
    """The process would have ended."""


class Coordinator:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def call(self, method: Callable[..., Any], *args: Any) -> None:
        self.told.append((method.__name__, *args))


class Worker:
    """What it hears, in the place of a roster that it has."""

    def __init__(self, position: int) -> None:
        self.name, self.coordinator = f"w{position}", Coordinator()
        self.events: list[Any] = []
        outbox: Any = SimpleNamespace(event=self.events.append, flush=lambda: None)
        coordinator: Any = self.coordinator
        self._disputes = Disputes(self.name, coordinator, outbox)
        self._run: Any = SimpleNamespace(
            position=position, lead=position == 0, generation=7, skips=()
        )

    def compared(self, step: int, checksums: list[int | None], confirmed: bool = False) -> None:
        self._disputes.compared(self._run, step, checksums, confirmed)

    def witnessed(self, step: int, digests: dict[int, int], skips: tuple[Any, ...] = ()) -> bool:
        self._run.skips = skips
        return self._disputes.witnessed(self._run, step, digests)


Workers = Callable[[int], list[Worker]]


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Makes so many replicas of one worker, each with a coordinator of its own."""

    def leave(code: int) -> None:
        assert code == CORRUPT_EXIT_CODE
        raise LeftError

    monkeypatch.setattr(os, "_exit", leave)

    def make(replicas: int) -> list[Worker]:
        return [Worker(position) for position in range(replicas)]

    return make


def told(link: Worker) -> list[str]:
    return [call[0] for call in link.coordinator.told]


def test_of_three_states_the_one_that_differs_leaves(links: Workers) -> None:
    """The first of the others says so, too: that one may die before its call."""
    a, b, c = links(3)
    for link, said in ((a, ["spread"]), (c, [])):
        link.compared(10, [5, 6, 5])
        assert told(link) == said
        assert [event.equal for event in link.events] == [False] * len(said)
    with pytest.raises(LeftError):
        b.compared(10, [5, 6, 5])
    assert b.events == []
    ((method, worker, generation, detail, spread),) = b.coordinator.told
    assert (method, worker, generation, spread) == ("corrupt", "w1", 7, True)
    assert "differs from most replicas'" in detail


def test_that_states_are_equal_is_told_where_they_are_so_in_all_slots(links: Workers) -> None:
    lead, other = links(2)
    for confirmed in (False, True):
        lead.compared(10, [5, 5], confirmed)
        other.compared(10, [5, 5])
    assert [(event.step, event.equal, event.replicas) for event in lead.events] == [(10, True, 2)]
    assert other.events == []


def test_who_has_no_state_yet_is_not_counted_among_those_that_are_compared(links: Workers) -> None:
    lead, _ = links(2)
    lead.compared(10, [5, None], True)
    assert [(event.equal, event.replicas) for event in lead.events] == [(True, 1)]


@pytest.mark.parametrize(("confirmed", "leaves"), [(5, "w1"), (6, "w0"), (9, None)])
def test_of_two_states_the_one_that_is_not_confirmed_leaves(
    links: Workers, confirmed: int, leaves: str | None
) -> None:
    *pair, newcomer = links(3)
    for link in (*pair, newcomer):
        link.compared(10, [5, 6, None])
    assert [told(link) for link in pair] == [["undecided"]] * 2, "either may die before its call"
    assert told(newcomer) == []
    for link in pair:
        link.compared(5, [3, 3])
        link.coordinator.told.clear()
        if link.name == leaves:
            with pytest.raises(LeftError):
                link.compared(10, [confirmed, confirmed])
            ((_, worker, _, _, spread),) = link.coordinator.told
            assert (worker, spread) == (leaves, False)
        else:
            link.compared(10, [confirmed, confirmed])
            assert told(link) == []


def test_of_three_gradients_the_one_that_differs_leaves(links: Workers) -> None:
    a, b, c = links(3)
    assert not a.witnessed(9, {2: 8, 0: 8, 1: 7}) and not c.witnessed(9, {2: 8, 0: 8, 1: 7})
    with pytest.raises(LeftError):
        b.witnessed(9, {2: 8, 0: 8, 1: 7})
    ((method, worker, _, detail, spread),) = b.coordinator.told
    assert (method, worker, spread) == ("corrupt", "w1", False)
    shown, _, otherwise = detail.partition(". ")
    assert shown.endswith("in step 9: 7 of 8, 8, 7")
    assert "the dataset gives other items for an index" in otherwise, "it may be sound"
    assert a.witnessed(9, {2: 8, 0: 8}) and told(a) == [], "it had not been undecided"


def test_of_two_gradients_the_one_that_comes_to_another_leaves(links: Workers) -> None:
    a, b, newcomer = links(3)
    for link in (a, b, newcomer):
        assert not link.witnessed(9, {1: 7, 0: 8})
        assert told(link) == []
    assert a.witnessed(9, {1: 8, 0: 8}) and newcomer.witnessed(9, {1: 8, 0: 8})
    with pytest.raises(LeftError):
        b.witnessed(9, {1: 8, 0: 8})


def test_two_that_differ_twice_end_the_run(links: Workers) -> None:
    pair = links(2)
    for _ in range(2):
        assert not any(link.witnessed(9, {1: 7, 0: 8}) for link in pair)
    assert [told(link) for link in pair] == [[], [CoordinatorApi.fail.__name__]]
    assert "twice: 7, 8" in pair[1].coordinator.told[0][1]
    assert not pair[0].witnessed(14, {1: 7, 0: 8}), "of another step it is the first time"


def test_a_lane_that_nobody_else_computed_confirms_nothing(links: Workers) -> None:
    """The repeat was interrupted, and after it this replica still had its own lanes."""
    a, b = links(2)
    for link in (a, b):
        assert not link.witnessed(9, {0: 7, 1: 8})
        link.coordinator.told.clear()
    assert a.witnessed(9, {0: 7}) and b.witnessed(9, {0: 7})
    assert told(a) == told(b) == []


def test_with_other_samples_another_gradient_is_no_fault(links: Workers) -> None:
    """Nobody had done the step again before the run went back, and passed over some."""
    a, b = links(2)
    for link in (a, b):
        assert not link.witnessed(9, {0: 7, 1: 8})
    assert all(link.witnessed(9, {0: 5, 1: 5}, skips=((3, 1),)) for link in (a, b))
    assert told(a) == told(b) == []


def test_what_was_settled_is_forgotten(links: Workers) -> None:
    """The run goes back later, and the same step has other samples."""
    a, b = links(2)
    for link in (a, b):
        assert not link.witnessed(9, {0: 7, 1: 8})
    assert a.witnessed(9, {0: 7, 1: 7})
    a.coordinator.told.clear()
    assert a.witnessed(9, {0: 5, 1: 5}) and told(a) == []
