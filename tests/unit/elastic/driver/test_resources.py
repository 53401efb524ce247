from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from elastic import Float8
from elastic.config import ScalingConfig
from elastic.driver.resources import check_kinds, count_fitting, find_lacking, find_unused
from tests.support.small_llama import small_train
from trainer.config import ParallelConfig, TrainConfig
from trainer.errors import ConfigError

CPU = ScalingConfig(cpus_per_worker=1)
GPU = ScalingConfig(device="cuda", cpus_per_worker=4)


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
