"""While a run waits for its first machines, Ray knows what it waits for; afterwards no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from elastic import ParallelConfig, ResourcesError, ScalingConfig
from elastic.driver.resources import wait_for_workers

PATIENCE_S = 30.0
PAIR = ParallelConfig(shard=2)


def standing(*states: str) -> list[int]:
    """Sizes of the placement groups that are in one of these states."""
    table = placement_group_table().values()
    return [len(row["bundles"]) for row in table if row["state"] in states]


@contextmanager
def all_cpus_taken() -> Iterator[None]:
    """Somebody else has all but one."""
    taken = placement_group([{"CPU": ray.cluster_resources()["CPU"] - 1}])
    assert taken.wait(PATIENCE_S)
    yield
    remove_placement_group(taken)


def test_what_a_start_waits_for_is_asked_for_until_it_is_there(cluster: None) -> None:
    scaling = ScalingConfig(max_replicas=2, wait_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        with all_cpus_taken():
            waiting = pool.submit(wait_for_workers, scaling, PAIR)
            deadline = time.monotonic() + PATIENCE_S
            while standing("PENDING") != [2]:
                assert time.monotonic() < deadline and not waiting.done(), placement_group_table()
                time.sleep(0.05)
        assert waiting.result().replicas >= 1
    assert standing("PENDING", "CREATED") == []


def test_what_does_not_come_is_asked_for_no_longer(cluster: None) -> None:
    told = r"has free 1 CPU, room for 1 of this run.s workers.*wait_s where"
    with all_cpus_taken(), pytest.raises(ResourcesError, match=told):
        wait_for_workers(ScalingConfig(wait_s=1.0), PAIR)
    assert standing("PENDING", "CREATED") == []
