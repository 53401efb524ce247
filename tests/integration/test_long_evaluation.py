"""A worker whose work takes longer than the timeouts is not stuck, and hears of faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ray.train import RunConfig

from elastic import (
    CustomTask,
    ElasticTrainer,
    HealthConfig,
    ScalingConfig,
    TrainConfig,
    parse_faults,
)
from tests.support.user_code import model, slow_to_evaluate
from tests.support.watching import events_of

TIMEOUT_S, EVALUATION_S = 2.0, 8.0


@pytest.mark.soak
def test_an_evaluation_longer_than_the_timeouts(cluster: None, tmp_path: Path) -> None:
    """After the first kill the only replica with state evaluates while a successor waits to enter:
    it was killed for it. It enters and heals before the second kill, which finds the others
    evaluating: they leave it at once."""
    samples = [torch.tensor([float(i)]) for i in range(16)]
    task = CustomTask(
        build_model=model,
        loss_function=slow_to_evaluate,
        dataset=samples,
        eval_dataset=samples,
    )
    result = ElasticTrainer(
        TrainConfig(task=task, steps=24, global_batch=2, lanes=2, eval_every=10),
        scaling=ScalingConfig(max_replicas=2, spares=1),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        health=HealthConfig(regroup_timeout_s=TIMEOUT_S),
        faults=parse_faults("kill@8:1,kill@20.evaluation:1"),
    ).fit()
    assert result.metrics is not None
    assert (result.metrics["outcome"], result.metrics["lost_steps"]) == ("finished", 0)
    lost = events_of(tmp_path / "run", "worker_lost")
    assert [e["cause"] for e in lost] == ["crash", "crash"], lost
    evaluated = {e["step"] for e in events_of(tmp_path / "run", "evaluated")}
    assert evaluated == {10, 24}, "what a fault interrupts is not made up for"
    second = result.metrics["incidents"][1]
    assert second["abort_s"] < EVALUATION_S / 2, second
