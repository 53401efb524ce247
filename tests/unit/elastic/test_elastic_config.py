from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from elastic.config import HealthConfig, ScalingConfig, WorkerPlan, plan_workers
from elastic.node_config import Ec2Nodes, KubeNodes, LocalNodes
from elastic.training_config import TrainingHealthConfig
from trainer.config import ParallelConfig
from trainer.errors import ConfigError

ONE = ParallelConfig()
FOUR = ParallelConfig(shard=2, tensor=2)


def test_the_defaults_are_sound() -> None:
    ScalingConfig().check(ONE)
    HealthConfig().check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_replicas": 0},
            "scaling.max_replicas = 0: a run needs a replica. Use 1 or more.",
        ),
        (
            {"max_replicas": 2, "min_replicas": 3},
            "scaling.min_replicas = 3: not between 1 and max_replicas = 2. Use 1 to 2.",
        ),
        (
            {"max_replicas": 2, "min_replicas": 0},
            "scaling.min_replicas = 0: not between 1 and max_replicas = 2. Use 1 to 2.",
        ),
        ({"spares": -1}, "scaling.spares = -1: negative. Use 0 or more."),
        (
            {"cpus_per_worker": 0},
            "scaling.cpus_per_worker = 0: no CPU. Use a positive number.",
        ),
        (
            {"cpus_per_worker": -1, "device": "cuda"},
            "scaling.cpus_per_worker = -1: no CPU. Use a positive number.",
        ),
        (
            {"cpus_per_worker": math.nan},
            "scaling.cpus_per_worker = nan: no CPU. Use a positive number.",
        ),
        ({"wait_s": math.nan}, "scaling.wait_s = nan: no time. Use 0 or more."),
        ({"wait_s": -1.0}, "scaling.wait_s = -1.0: no time. Use 0 or more."),
    ],
)
def test_a_number_that_cannot_work_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ScalingConfig(**settings).check(ONE)
    assert str(caught.value) == message


NO_BOUNDS = ("replace_nodes", "move_slow", "preflight", "training")


@pytest.mark.parametrize("name", [f.name for f in fields(HealthConfig) if f.name not in NO_BOUNDS])
@pytest.mark.parametrize("value", [0, -1])
def test_every_bound_of_health_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        HealthConfig(**{name: value}).check()  # type: ignore[arg-type]
    assert str(caught.value) == f"health.{name} = {value}: not positive. Use a positive number."


@pytest.mark.parametrize("name", [f.name for f in fields(HealthConfig) if "float" in str(f.type)])
def test_no_bound_of_health_is_nan(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"health\.{name} = nan: not positive"):
        HealthConfig(**{name: math.nan}).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [f.name for f in fields(HealthConfig) if f.name.endswith("_timeout_s")]
)
def test_no_wait_of_health_is_without_end(name: str) -> None:
    """Ray and torch count it in whole milliseconds: the run would end where one is waited for."""
    with pytest.raises(ConfigError) as caught:
        HealthConfig(**{name: math.inf}).check()  # type: ignore[arg-type]
    none = "None for no bound, or " if name == "progress_timeout_s" else ""
    assert str(caught.value) == (
        f"health.{name} = inf: torch and Ray cannot wait so long. "
        f"Use {none}a number of seconds: 86400 is a day."
    )


def test_a_supervisor_that_lives_does_not_end_its_run() -> None:
    """It is heard every 5.0 to 5.5 s: with less, every run would end itself."""
    HealthConfig(supervisor_timeout_s=20.0).check()
    with pytest.raises(ConfigError) as caught:
        HealthConfig(supervisor_timeout_s=19.0).check()
    assert str(caught.value) == (
        "health.supervisor_timeout_s = 19.0: a supervisor that lives is heard every 5 s, "
        "or somewhat later. Use 20 or more."
    )


def test_nor_one_of_training() -> None:
    with pytest.raises(ConfigError, match=r"health\.training\.loss_sigmas = nan: not positive"):
        HealthConfig(training=TrainingHealthConfig(loss_sigmas=math.nan)).check()


@pytest.mark.parametrize("name", ["window_steps", "spike_steps", "loss_sigmas", "max_skips"])
def test_every_bound_of_training_must_be_positive(name: str) -> None:
    settings: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=rf"health\.training\.{name} = 0: not positive"):
        HealthConfig(training=TrainingHealthConfig(**settings)).check()


def test_what_is_passed_over_is_longer_than_the_trouble() -> None:
    training = TrainingHealthConfig(on_nonfinite="skip_data", skip_steps=4)
    with pytest.raises(ConfigError, match="takes up to 5 steps, whose samples would come again"):
        HealthConfig(training=training).check()
    HealthConfig(training=training, max_nonfinite_steps=4).check()
    HealthConfig(training=TrainingHealthConfig(skip_steps=4)).check()


def test_one_late_beat_may_not_lose_a_node() -> None:
    HealthConfig(node_beat_s=1.0, node_timeout_s=2.1).check()
    with pytest.raises(ConfigError) as caught:
        HealthConfig(node_beat_s=1.0, node_timeout_s=2.0).check()
    assert str(caught.value) == (
        "health.node_timeout_s = 2.0: one late beat of node_beat_s = 1 would lose a node. "
        "Use more than 2."
    )


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (lambda: "ray", "health.replace_nodes = 'ray': of type str, not 'tell' or a RayNodes"),
        (lambda: LocalNodes(cpus=0), "health.replace_nodes.cpus = 0: no worker could start."),
        (lambda: Ec2Nodes(tag="llama"), "health.replace_nodes.tag = 'llama': not of the form"),
        (lambda: Ec2Nodes(tag="=x"), "health.replace_nodes.tag = '=x': not of the form KEY=VALUE"),
        (
            lambda: Ec2Nodes(tag="a=b", subnets=("subnet-1",)),
            "health.replace_nodes.subnets = ('subnet-1',): an Auto Scaling group has its own",
        ),
        (lambda: Ec2Nodes(tag=1), "health.replace_nodes.tag = 1: of type int, not a text"),  # type: ignore[arg-type]
        (
            lambda: KubeNodes(reboot="yes"),  # type: ignore[arg-type]
            "health.replace_nodes.reboot = 'yes': of type str, not True or False",
        ),
    ],
)
def test_a_provider_that_cannot_work_is_refused(nodes: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HealthConfig(replace_nodes=nodes()).check()
    assert str(caught.value).startswith(message)


def test_what_ray_reserves_for_a_worker() -> None:
    assert ScalingConfig(cpus_per_worker=2).resources_per_worker == {"CPU": 2}
    gpu = ScalingConfig(device="cuda", cpus_per_worker=0)
    gpu.check(ONE)
    assert gpu.resources_per_worker == {"CPU": 0, "GPU": 1}
    half = ScalingConfig(device="cuda", gpus_per_worker=0.5)
    half.check(ONE)
    assert half.resources_per_worker == {"CPU": 1, "GPU": 0.5}


@pytest.mark.parametrize("gpus", [0.0, -1.0, 2.0])
def test_a_worker_has_one_gpu_or_a_part_of_one(gpus: float) -> None:
    with pytest.raises(ConfigError, match=r"scaling\.gpus_per_worker = .*shares one"):
        ScalingConfig(gpus_per_worker=gpus).check(ONE)


@pytest.mark.parametrize(
    ("parallel", "fitting", "plan"),
    [
        (ONE, 100, WorkerPlan(replicas=4, spares=2)),
        (ONE, 5, WorkerPlan(replicas=4, spares=1)),
        (ONE, 3, WorkerPlan(replicas=3, spares=0)),
        (ONE, 2, WorkerPlan(replicas=2, spares=0)),
        (ONE, 1, None),
        (ONE, 0, None),
        (FOUR, 100, WorkerPlan(replicas=4, spares=2)),
        (FOUR, 17, WorkerPlan(replicas=4, spares=1)),
        (FOUR, 15, WorkerPlan(replicas=3, spares=2)),
        (FOUR, 8, WorkerPlan(replicas=2, spares=0)),
        (FOUR, 7, None),
    ],
)
def test_replicas_come_before_spares(
    parallel: ParallelConfig, fitting: int, plan: WorkerPlan | None
) -> None:
    scaling = ScalingConfig(max_replicas=4, min_replicas=2, spares=2)
    assert plan_workers(scaling, parallel, fitting) == plan


def test_the_preflight_can_be_left_out() -> None:
    HealthConfig(preflight=False).check()
    HealthConfig(preflight="full").check()
    with pytest.raises(ConfigError, match="preflight = 'quick'"):
        HealthConfig(preflight="quick").check()  # type: ignore[arg-type]
