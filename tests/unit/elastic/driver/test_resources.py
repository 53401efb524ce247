from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from elastic import Float8
from elastic.config import ScalingConfig
from elastic.driver.resources import (
    check_kinds,
    count_fitting,
    find_idle,
    find_lacking,
    find_unused,
)
from tests.support.small_llama import small_train
from trainer.config import ParallelConfig, TrainConfig
from trainer.errors import ConfigError

CPU = ScalingConfig(cpus_per_worker=1)
GPU = ScalingConfig(device="cuda", cpus_per_worker=4)


def share(gpus: float) -> ScalingConfig:
    return ScalingConfig(device="cuda", cpus_per_worker=0, gpus_per_worker=gpus)


@pytest.mark.parametrize(
    ("scaling", "there", "workers"),
    [
        (CPU, {"CPU": 3.0, "memory": 1e9}, 3),
        (CPU, {"CPU": 3.9}, 3),
        (CPU, {"CPU": 0.5}, 0),
        (CPU, {}, 0),
        (ScalingConfig(cpus_per_worker=0.1), {"CPU": 0.3}, 3),  # 0.3 / 0.1 is a hair below 3
        (ScalingConfig(cpus_per_worker=1.5), {"CPU": 4.0}, 2),
        (GPU, {"CPU": 96.0, "GPU": 8.0}, 8),
        (GPU, {"CPU": 9.0, "GPU": 8.0}, 2),
        (GPU, {"CPU": 96.0}, 0),
        (ScalingConfig(device="cuda", cpus_per_worker=0), {"GPU": 2.0}, 2),
        (GPU, {"CPU": 96.0, "GPU": 1.5}, 1),
        (share(0.8), {"GPU": 8.0}, 8),  # not 10: Ray gives no worker parts of two GPUs
        (share(0.8), {"GPU": 7.2}, 7),  # one is there already
        (share(0.5), {"GPU": 8.0}, 16),
        (share(0.5), {"GPU": 0.5}, 1),
        (share(0.5), {"GPU": 1.5}, 3),
        (share(0.6), {"GPU": 0.5}, 0),
        (share(1 / 3), {"GPU": 8.0}, 24),
        (share(0.1), {"GPU": 0.3}, 3),
        (share(0.5), {}, 0),
    ],
)
def test_the_scarcest_resource_decides(
    scaling: ScalingConfig, there: dict[str, float], workers: int
) -> None:
    assert count_fitting(scaling, there) == workers


@pytest.mark.parametrize(
    ("kinds", "asked", "refused"),
    [
        (["T4", "V100"], {"precision": "bfloat16"}, "GPUs are T4, V100, and bfloat16 needs"),
        (["T4", "A100"], {"precision": "bfloat16"}, None),
        (["T4"], {}, None),
        ([], {"precision": "bfloat16"}, None),
        (["R300"], {"precision": "bfloat16", "converters": (Float8(),)}, None),
        (["A100-40G"], {"converters": (Float8(),)}, "GPUs are A100-40G, and an 8-bit product"),
        (["A100-40G", "H100"], {"converters": (Float8(),)}, None),
    ],
)
def test_what_no_gpu_of_the_cluster_computes_is_refused(
    kinds: list[str], asked: dict[str, Any], refused: str | None
) -> None:
    train = small_train(**asked)
    outcome = nullcontext() if refused is None else pytest.raises(ConfigError, match=refused)
    with outcome:
        check_kinds(train, kinds)


@pytest.mark.parametrize(
    ("scaling", "gpus", "precision", "determinism", "said"),
    [
        (CPU, 0, "float32", "strict", None),
        (CPU, 8, "float32", "strict", "scaling.device = 'cpu'"),
        (CPU, 8, "bfloat16", "strict", "scaling.device = 'cpu'"),
        (GPU, 8, "float32", "strict", "train.precision = 'float32'"),
        (GPU, 0, "float32", "strict", "train.precision = 'float32'"),
        (GPU, 8, "float32", "fast", None),
        (GPU, 8, "bfloat16", "strict", None),
    ],
)
def test_what_defaults_leave_unused_of_a_cluster_with_gpus_is_told(
    scaling: ScalingConfig, gpus: float, precision: Any, determinism: Any, said: str | None
) -> None:
    train = TrainConfig(
        task=None, steps=1, global_batch=1, precision=precision, determinism=determinism
    )
    found = find_unused(scaling, train, gpus)
    assert [one.split(":")[0] for one in found] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("replicas", "shard", "spares", "room", "lacking"),
    [
        (2, 1, 1, 3, None),
        (2, 1, 1, 2, 1),
        (2, 2, 3, 5, 2),
        (2, 2, 3, 4, 3),
        (2, 1, 1, 1, 1),  # a replica, too, which the run tells of itself
        (2, 1, 0, 1, None),
    ],
)
def test_spares_that_the_cluster_has_no_room_for_are_told_of(
    replicas: int, shard: int, spares: int, room: int, lacking: int | None
) -> None:
    scaling = ScalingConfig(max_replicas=replicas, spares=spares)
    told = find_lacking(scaling, ParallelConfig(shard=shard), room)
    if lacking is None:
        assert told is None
        return
    assert told is not None
    assert told.startswith(f"scaling.spares = {spares}: {lacking} of them will not be there: ")
    assert f"room for {room} workers, with 1 CPU each, and {replicas * shard} train. " in told
    assert told.endswith(f"or use spares={spares - lacking}")


LEVELS, TENSOR = ParallelConfig(shard=16, workers_per_node=8), ParallelConfig(tensor=4)
ONE_NODE_LARGER = [8, *[4] * 6]


@pytest.mark.parametrize(
    ("parallel", "rooms", "most", "least", "idle"),
    [
        (LEVELS, ONE_NODE_LARGER, 2, 1, 16),
        (LEVELS, ONE_NODE_LARGER, 2, 2, None),  # below the least it trains with what there is
        (LEVELS, ONE_NODE_LARGER, 1, 1, None),
        (LEVELS, [8] * 4, 2, 1, None),
        (LEVELS, [8] * 3, 2, 1, None),  # too few workers are no matter of their nodes
        (LEVELS, [4] * 8, 2, 1, None),  # no node holds a group: none is waited for
        (ParallelConfig(shard=16, workers_per_node=4), ONE_NODE_LARGER, 2, 1, None),
        (TENSOR, [6, 6], 3, 1, 4),
        (TENSOR, [6, 6], 2, 1, None),
        (ParallelConfig(shard=4), [6, 6], 3, 1, None),
        (LEVELS, [], 2, 1, None),
    ],
)
def test_workers_that_unequal_nodes_leave_idle_are_told_of(
    parallel: ParallelConfig, rooms: list[int], most: int, least: int, idle: int | None
) -> None:
    told = find_idle(ScalingConfig(max_replicas=most, min_replicas=least), parallel, rooms)
    assert ("" if told is None else told).partition(". ")[0] == (
        ""
        if idle is None
        else f"train.parallel.{'tensor' if parallel is TENSOR else 'workers_per_node'} = "
        f"{parallel.dims.together}: {idle} workers will be idle"
    )


def test_the_nodes_of_idle_workers_are_named() -> None:
    told = find_idle(ScalingConfig(max_replicas=2), LEVELS, ONE_NODE_LARGER)
    assert told is not None
    assert "(by workers: 6 of 4, 1 of 8) hold such groups for 0 of 2 replicas" in told
