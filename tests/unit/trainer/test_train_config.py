"""The training settings: what is accepted, what is refused, and how a step is divided."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.optimizer import WarmupCosine


def config_with(**changes: Any) -> TrainConfig:
    """Valid with 4 lanes: 4 x 2 streams of 3 samples each."""
    return TrainConfig(
        **{
            "task": None,
            "steps": 10,
            "global_batch": 24,
            "parallel": ParallelConfig(shard=2, tensor=3),
            **changes,
        }
    )


def refusal(config: TrainConfig, lanes: int = 4) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.check(lanes)
    return caught.value


def test_a_valid_configuration_passes() -> None:
    config_with().check(4)
    config_with(eval_every=1).check(4)
    config_with(micro_batch=1, precision="bfloat16").check(4)
    config_with(reduction="fast", determinism="fast").check(4)
    TrainConfig(task=None, steps=1, global_batch=1, eval_samples=1).check(1)


def nodes_of(workers_per_node: int, *, shard: int, tensor: int = 1) -> dict[str, Any]:
    parallel = ParallelConfig(shard=shard, tensor=tensor, workers_per_node=workers_per_node)
    return {"parallel": parallel, "global_batch": 48}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"steps": 0}, "train.steps", 0),
        ({"steps": -3}, "train.steps", -3),
        ({"global_batch": 0}, "train.global_batch", 0),
        ({"parallel": ParallelConfig(shard=0)}, "train.parallel.shard", 0),
        ({"parallel": ParallelConfig(tensor=-1)}, "train.parallel.tensor", -1),
        (nodes_of(3, shard=4), "train.parallel.workers_per_node", 3),
        (nodes_of(4, shard=4), "train.parallel.workers_per_node", 4),  # all on one
        (nodes_of(1, shard=4), "train.parallel.workers_per_node", 1),  # one on each
        (nodes_of(2, shard=4, tensor=2), "train.parallel.workers_per_node", 2),  # a tensor group
        (nodes_of(2, shard=2), "train.parallel.workers_per_node", 2),
        ({"eval_samples": 0}, "train.eval_samples", 0),
        ({"eval_every": 0}, "train.eval_every", 0),
        ({"eval_every": -5}, "train.eval_every", -5),
        ({"reduction": "fast"}, "train.reduction", "fast"),
        ({"global_batch": 25}, "train.global_batch", 25),
        ({"global_batch": 28}, "train.global_batch", 28),
        ({"micro_batch": 0}, "train.micro_batch", 0),
        ({"bucket_bytes": 1023}, "train.bucket_bytes", 1023),
        ({"micro_batch": -1}, "train.micro_batch", -1),
        ({"micro_batch": 2}, "train.micro_batch", 2),
        ({"micro_batch": 6}, "train.micro_batch", 6),
        ({"optimizer": OptimizerConfig(lr=0)}, "train.optimizer.lr", 0),
        ({"optimizer": OptimizerConfig(min_lr_ratio=-0.1)}, "train.optimizer.min_lr_ratio", -0.1),
        ({"optimizer": OptimizerConfig(min_lr_ratio=1.1)}, "train.optimizer.min_lr_ratio", 1.1),
        ({"optimizer": OptimizerConfig(warmup_steps=-1)}, "train.optimizer.warmup_steps", -1),
        ({"optimizer": OptimizerConfig(weight_decay=-1)}, "train.optimizer.weight_decay", -1),
        ({"optimizer": OptimizerConfig(clip_norm=-1)}, "train.optimizer.clip_norm", -1),
        ({"optimizer": OptimizerConfig(betas=(1.0, 0.9))}, "train.optimizer.betas[0]", 1.0),
        ({"optimizer": OptimizerConfig(betas=(-0.1, 0.9))}, "train.optimizer.betas[0]", -0.1),
        ({"optimizer": OptimizerConfig(betas=(0.9, 1.0))}, "train.optimizer.betas[1]", 1.0),
        ({"optimizer": OptimizerConfig(betas=(0.9, -0.1))}, "train.optimizer.betas[1]", -0.1),
        ({"optimizer": OptimizerConfig(eps=0.0)}, "train.optimizer.eps", 0.0),
        ({"optimizer": OptimizerConfig(eps=-1.0)}, "train.optimizer.eps", -1.0),
    ],
)
def test_a_value_that_cannot_work_is_named(
    changes: dict[str, Any], field: str, value: object
) -> None:
    error = refusal(config_with(**changes))
    assert (error.field, error.value) == (field, value)
    assert error.fix.startswith("Use ")


@pytest.mark.parametrize("value", [0, -2])
def test_no_workers_on_a_node_are_refused_at_once(value: int) -> None:
    """Whoever asks for the mesh would divide by it."""
    with pytest.raises(ConfigError, match=rf"workers_per_node = {value}: .*Use 1 or more, or None"):
        ParallelConfig(shard=4, workers_per_node=value)


def test_the_lanes_in_force_are_checked() -> None:
    assert refusal(config_with(lanes=4), lanes=0).field == "train.lanes"
    assert refusal(config_with(), lanes=5).field == "train.global_batch"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["lr", "min_lr_ratio", "eps", "weight_decay", "clip_norm"])
def test_a_setting_that_is_not_a_finite_number_is_refused(name: str, value: float) -> None:
    changed: Any = {name: value}
    error = refusal(config_with(optimizer=OptimizerConfig(**changed)))
    assert error.field == f"train.optimizer.{name}"


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(min_lr_ratio=0, warmup_steps=0, weight_decay=0, clip_norm=0),
        OptimizerConfig(betas=(0.0, 0.0), eps=1e-30),
        OptimizerConfig(min_lr_ratio=1, warmup_steps=10**6),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(optimizer: OptimizerConfig) -> None:
    optimizer.check()


@pytest.mark.parametrize(
    ("optimizer", "field"),
    [
        (OptimizerConfig(warmup_steps=10), "train.optimizer.warmup_steps"),
        (OptimizerConfig(warmup_steps=11), "train.optimizer.warmup_steps"),
        (
            OptimizerConfig(schedule=WarmupCosine(warmup_steps=10)),
            "train.optimizer.schedule.warmup_steps",
        ),
    ],
)
def test_a_warm_up_that_the_run_does_not_outlast_is_refused(
    optimizer: OptimizerConfig, field: str
) -> None:
    error = refusal(config_with(steps=10, optimizer=optimizer))
    assert error.field == field
    assert "10 steps" in error.fact and error.fix == "Use 9 or fewer, or more train.steps"


def test_a_warm_up_that_the_run_outlasts_is_taken() -> None:
    for steps, warmup_steps in ((10, 9), (1, 0)):
        config_with(steps=steps, optimizer=OptimizerConfig(warmup_steps=warmup_steps)).check(4)
    schedule = WarmupCosine(warmup_steps=2)  # the other one is not used
    config_with(steps=10, optimizer=OptimizerConfig(warmup_steps=99, schedule=schedule)).check(4)


def test_the_batch_to_use_instead_is_suggested() -> None:
    error = refusal(config_with(global_batch=30))
    assert "4 lanes x 2 shard ranks = 8" in error.fact
    assert error.fix == "Use a multiple of 8, such as 24 or 32"
    assert "such as 8" in refusal(config_with(global_batch=3)).fix


def test_the_micro_batch_to_use_instead_is_suggested() -> None:
    error = refusal(config_with(micro_batch=2))
    assert "3 samples" in error.fact
    assert "divisor of 3" in error.fix


@settings(deadline=None)
@given(
    lanes=st.integers(1, 9), shard=st.integers(1, 4), micros=st.integers(1, 4), size=st.integers(1)
)
def test_an_accepted_batch_falls_into_equal_parts(
    lanes: int, shard: int, micros: int, size: int
) -> None:
    config = config_with(
        global_batch=lanes * shard * micros * size,
        micro_batch=size,
        parallel=ParallelConfig(shard=shard),
    )
    config.check(lanes)
    assert config.lane_samples(lanes) == micros * size
    assert config.micro_samples(lanes) == size


def test_without_a_micro_batch_a_worker_takes_all_of_its_lane() -> None:
    assert config_with().micro_samples(4) == config_with().lane_samples(4) == 3


def test_a_replica_has_shard_times_tensor_workers() -> None:
    assert ParallelConfig(shard=2, tensor=3).workers == 6
    assert ParallelConfig().workers == 1


def test_a_configuration_is_made_without_torch() -> None:
    code = (
        "import sys, trainer.config; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
