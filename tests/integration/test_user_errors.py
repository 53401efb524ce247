"""Errors in user code and non-finite losses end a run with what the user needs to know, and
soon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ray.train import RunConfig

from elastic import (
    CustomTask,
    ElasticTrainer,
    HealthConfig,
    RunFailedError,
    ScalingConfig,
    TrainConfig,
)
from elastic.protocol.events import WorkerLost
from elastic.reporting.event_log import read_events
from tests.support.user_code import endless_loss, failing_loss, model


def trainer(loss: object, storage: Path) -> ElasticTrainer:
    task = CustomTask(
        build_model=model,
        loss_function=loss,  # type: ignore[arg-type]
        dataset=[torch.tensor([float(i)]) for i in range(8)],
    )
    return ElasticTrainer(
        TrainConfig(task=task, steps=8, global_batch=2, lanes=2),
        scaling=ScalingConfig(max_replicas=2),
        run_config=RunConfig(name="run", storage_path=str(storage)),
        health=HealthConfig(max_nonfinite_steps=3),
    )


def test_a_bug_in_user_code_ends_the_run_with_the_users_traceback(
    cluster: None, tmp_path: Path
) -> None:
    with pytest.raises(RunFailedError) as caught:
        trainer(failing_loss, tmp_path).fit()
    assert "RuntimeError: gloo: sample 5 is not to my taste" in str(caught.value)
    assert "failing_loss" in str(caught.value)
    assert "user code raised, 2 times at step" in str(caught.value)
    lost = [e for e in read_events(tmp_path / "run" / "events.jsonl") if isinstance(e, WorkerLost)]
    assert {event.cause for event in lost} == {"user_error"}


def test_non_finite_steps_end_the_run_naming_step_and_samples(
    cluster: None, tmp_path: Path
) -> None:
    with pytest.raises(RunFailedError, match=r"3 steps in a row up to step 2 .*samples of step 2"):
        trainer(endless_loss, tmp_path).fit()
