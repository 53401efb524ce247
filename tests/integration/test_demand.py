"""While a run waits for its first machines, Ray knows what it waits for; afterwards no more. One
that others forestall goes on waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest
import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from elastic import ParallelConfig, ResourcesError, ScalingConfig
from elastic.driver import resources
from elastic.driver.resources import wait_for_workers
from elastic.ray_compat import groups as groups_module
from elastic.ray_compat import placement
from elastic.ray_compat.groups import PlacementGroups
from tests.support.watching import wait_until

PATIENCE_S = 30.0
PAIR = ParallelConfig(shard=2)


def standing(*states: str) -> list[int]:
    """Sizes of the placement groups that are in one of these states."""
    table = placement_group_table().values()
    return [len(row["bundles"]) for row in table if row["state"] in states]


def free() -> float:
    """CPUs that nobody has."""
    return float(ray.available_resources().get("CPU", 0.0))


@contextmanager
def taken(cpus: float) -> Iterator[None]:
    """Somebody else has so many."""
    group = placement_group([{"CPU": cpus}])
    assert group.wait(PATIENCE_S)
    try:
        yield
    finally:
        remove_placement_group(group)


def all_but(cpus: float) -> AbstractContextManager[None]:
    """Somebody else has all others."""
    return taken(ray.cluster_resources()["CPU"] - cpus)


def asked_for(
    prefix: str, *sizes: int, wait_s: float = PATIENCE_S, over: Callable[[], bool] = lambda: False
) -> PlacementGroups:
    """Groups of a run that starts with all of them or not at all."""
    least = sum(sizes)
    groups = PlacementGroups(f"{prefix}/", {"CPU": 1.0}, least=least, wait_s=wait_s, is_over=over)
    for size in sizes:
        groups.ask(size)
    return groups


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not wait for further machines once it has some."""
    for module in (placement, groups_module):
        monkeypatch.setattr(module, "START_PATIENCE_S", 0.1)


def test_what_a_start_waits_for_is_asked_for_until_it_is_there(cluster: None) -> None:
    scaling = ScalingConfig(max_replicas=2, wait_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        with all_but(1):
            waiting = pool.submit(wait_for_workers, scaling, PAIR)
            deadline = time.monotonic() + PATIENCE_S
            while standing("PENDING") != [2]:
                assert time.monotonic() < deadline and not waiting.done(), placement_group_table()
                time.sleep(0.05)
        assert waiting.result().replicas >= 1
    assert standing("PENDING", "CREATED") == []


def test_what_does_not_come_is_asked_for_no_longer(cluster: None) -> None:
    told = r"has free 1 CPU, room for 1 of this run.s workers.*wait_s where"
    with all_but(1), pytest.raises(ResourcesError, match=told):
        wait_for_workers(ScalingConfig(wait_s=1.0), PAIR)
    assert standing("PENDING", "CREATED") == []


def test_what_has_come_for_a_start_is_not_taken_from_it(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others ask for the same, and have what is given back at once."""
    monkeypatch.setattr(resources, "_INTERVAL_S", 2.0)  # it is placed between two looks
    others: list[PlacementGroup] = []
    with ThreadPoolExecutor(1) as pool, all_but(2):
        with taken(1):
            wait_until(lambda: free() == 1, PATIENCE_S)  # Ray says so somewhat later
            waiting = pool.submit(wait_for_workers, ScalingConfig(wait_s=10.0), PAIR)
            wait_until(lambda: standing("PENDING") == [2], PATIENCE_S)
        wait_until(lambda: 2 in standing("CREATED") or waiting.done(), PATIENCE_S)
        while not waiting.done():  # Ray tries a new one at once
            others.append(placement_group([{"CPU": 2}]))
            time.sleep(0.05)
        for other in others:
            remove_placement_group(other)
        assert waiting.result().replicas == 1


def test_a_start_that_lost_the_race_waits_for_all_that_it_needs_and_holds_no_half(
    cluster: None, hasty: None, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with all_but(3):
            groups = asked_for("lost", 2, 2)
            waiting = pool.submit(groups.wait, 1.0)
            wait_until(lambda: standing("PENDING") == [4], PATIENCE_S)
            assert "2 of the 4 workers of the smallest layout are placed" in caplog.text
            with taken(3):
                assert not waiting.done()
        assert waiting.result()
    assert standing("CREATED") == [2, 2]
    groups.shutdown()


def test_two_starts_that_want_the_same_machines_come_one_after_the_other(
    cluster: None, hasty: None
) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_S)
    scaling = ScalingConfig(max_replicas=2, min_replicas=2, wait_s=PATIENCE_S)

    def start(name: str) -> int:
        assert wait_for_workers(scaling, ParallelConfig(shard=4)).replicas == 2
        both.wait()
        groups = asked_for(name, 4, 4)
        groups.wait(1.0)
        placed = sum(size for _, size in groups)
        groups.shutdown()
        return placed

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, ("one", "other"))) == [8, 8]


def test_a_start_that_lost_the_race_for_good_says_what_it_needs(cluster: None) -> None:
    told = (
        r"needs 2 workers with 1 CPU each, but the room that there was is taken, .* "
        r"\(waited 1 s, scaling.wait_s"
    )
    with all_but(1), pytest.raises(ResourcesError, match=told):
        asked_for("gone", 2, wait_s=0.0).wait(1.0)
    assert standing("PENDING", "CREATED") == []


@pytest.mark.parametrize("placed", [0, 2])
def test_a_start_that_waits_for_room_ends_with_its_run(
    cluster: None, hasty: None, placed: int
) -> None:
    """Whether it waits for its groups, or in one piece as half of them was given back."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool, all_but(placed + 1):
        groups = asked_for("over", 2, 2, wait_s=3600.0, over=over.is_set)
        waiting = pool.submit(groups.wait, 1.0)
        expected = [4] if placed else [2, 2]
        wait_until(lambda: standing("PENDING") == expected, PATIENCE_S)
        over.set()
        with pytest.raises(ResourcesError):
            waiting.result(PATIENCE_S)
    assert standing("PENDING", "CREATED") == []
