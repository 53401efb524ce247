"""What `ElasticTrainer` is given by mistake is refused at once, and never ignored."""

from __future__ import annotations

from typing import Any

import pytest
import ray.train
import torch

import elastic
from elastic import ConfigError, CustomTask, ElasticTrainer, TrainConfig
from elastic.driver.arguments import warn_of_no_name

TASK = CustomTask(build_model=torch.nn.Identity, loss_function=max, dataset=[1])
TRAIN = TrainConfig(task=TASK, steps=1, global_batch=1)


class RaysCallback(ray.train.UserCallback):
    """One that would never be called."""


class Own(elastic.Callback):
    """One that is called."""


def refusal(**arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ElasticTrainer(**{"train": TRAIN, **arguments})
    return caught.value


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("train", {}, "elastic.TrainConfig"),
        ("scaling", {}, "elastic.ScalingConfig"),
        ("scaling", ray.train.ScalingConfig(), "elastic.ScalingConfig"),
        ("checkpoint", ray.train.CheckpointConfig(), "elastic.CheckpointConfig"),
        ("health", 3, "elastic.HealthConfig"),
        ("run_config", {"name": "run"}, "ray.train.RunConfig"),
        ("faults", "kill:0@3", "what elastic.parse_faults returns"),
        ("faults", ("kill:0@3",), "what elastic.parse_faults returns"),
        ("callbacks", Own(), "a tuple of elastic.Callback instances"),
        ("callbacks", (Own,), "a tuple of elastic.Callback instances"),
        ("callbacks", (Own(), RaysCallback()), "a tuple of elastic.Callback instances"),
    ],
)
def test_an_argument_of_another_type_is_refused(name: str, value: object, fix: str) -> None:
    error = refusal(**{name: value})
    assert error.field == name
    assert error.fix == f"Use {fix}"


def test_settings_without_a_task_are_refused() -> None:
    """`TrainConfig` takes them: those of a job are sent apart from its task."""
    error = refusal(train=TrainConfig(task=None, steps=1, global_batch=1))
    assert (error.field, error.value) == ("train.task", None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("failure_config", ray.train.FailureConfig(max_failures=3)),
        ("checkpoint_config", ray.train.CheckpointConfig(num_to_keep=2)),
        ("callbacks", [RaysCallback()]),
        ("storage_filesystem", object()),
    ],
)
def test_a_field_of_run_config_that_would_be_ignored_is_refused(field: str, value: object) -> None:
    changed: Any = {field: value}
    error = refusal(run_config=ray.train.RunConfig(name="run", **changed))
    assert error.field == f"run_config.{field}"
    assert error.value is value


@pytest.mark.parametrize(
    "name", ["..", ".", "a/b", "../x", "/x", "a/", ".data", "a\0b", "a\nb", "x" * 201, 7]
)
def test_a_name_that_is_no_segment_of_a_path_is_refused(name: Any) -> None:
    error = refusal(run_config=ray.train.RunConfig(name=name))
    assert (error.field, error.value) == ("run_config.name", name)
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["run", "Lauf 7", "größer", "a.b-c_d", "x" * 200, None])
def test_any_other_name_is_taken(name: str | None) -> None:
    ElasticTrainer(TRAIN, run_config=ray.train.RunConfig(name=name))


def test_rays_callbacks_are_answered_with_our_own() -> None:
    callbacks: Any = [RaysCallback()]
    run_config = ray.train.RunConfig(callbacks=callbacks)
    assert "ElasticTrainer(callbacks=...)" in refusal(run_config=run_config).fix
    own = Own()
    assert ElasticTrainer(TRAIN, callbacks=(own,)).callbacks == (own,)


def test_the_other_fields_of_run_config_are_used() -> None:
    more: dict[str, Any] = {
        "worker_runtime_env": {"env_vars": {"A": "1"}},
        "logging_config": ray.train.LoggingConfig(log_level="ERROR"),
    }
    run_config = ray.train.RunConfig(
        name="run",
        storage_path="/tmp/runs",
        failure_config=ray.train.FailureConfig(),
        **more,
    )
    assert ElasticTrainer(TRAIN, run_config=run_config).run_config is run_config


@pytest.mark.parametrize(
    ("make", "changes", "field"),
    [
        (elastic.ScalingConfig, {"max_replicas": "2"}, "scaling.max_replicas"),
        (elastic.ScalingConfig, {"spares": True}, "scaling.spares"),
        (elastic.ScalingConfig, {"device": "tpu"}, "scaling.device"),
        (elastic.HealthConfig, {"max_hangs": -1.5}, "health.max_hangs"),
        (elastic.HealthConfig, {"node_timeout_s": "5"}, "health.node_timeout_s"),
    ],
)
def test_a_setting_of_a_wrong_type_is_refused(
    make: Any, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize("given", [None, ray.train.RunConfig(storage_path="/data")])
def test_a_run_without_a_name_is_told_that_it_cannot_be_continued(
    given: ray.train.RunConfig | None, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = ElasticTrainer(TRAIN, run_config=given)
    warn_of_no_name(trainer.run_config)
    (told,) = caplog.messages
    assert repr(trainer.run_config.name) in told and "RunConfig(name=...)" in told


def test_callbacks_that_a_detached_program_would_not_call_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of a cluster that `fit` does not come to ask
    run = ray.train.RunConfig(name="run", storage_path="s3://bucket/runs")
    for callbacks, detach in (((), True), ((Own(),), False), ((Own(),), True)):
        assert not caplog.messages
        trainer = ElasticTrainer(TRAIN, run_config=run, callbacks=callbacks)
        with pytest.raises(ConfigError, match="storage_path"):
            trainer.fit(detach=detach)
    (told,) = caplog.messages
    assert told == "detach = True: no callback is told of a run that is under way."


def test_a_run_with_a_name_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_no_name(ElasticTrainer(TRAIN, run_config=ray.train.RunConfig(name="run")).run_config)
    assert not caplog.messages
