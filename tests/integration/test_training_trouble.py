"""A run whose losses stand out goes back and passes over the samples, with the same bits whatever
happens to it, and a later start knows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from ray.train import RunConfig

from checkpointing import CheckpointConfig, Keys, newest, open_store
from elastic import (
    CustomTask,
    ElasticTrainer,
    HealthConfig,
    OptimizerConfig,
    RunFailedError,
    ScalingConfig,
    TrainConfig,
    TrainingHealthConfig,
    parse_faults,
)
from elastic.protocol.events import FaultFired, TrainingTrouble, WentBack
from elastic.reporting.event_log import read_events, read_steps
from tests.support.gated_run import saved_weights
from tests.support.user_code import model, summed_loss
from trainer.data import sample_ids
from trainer.replication.step_commit import sample_digest

SAMPLES, BATCH, SEED = 400, 2, 3
BAD, SKIPPED = 20, 4
"""The first of three steps whose samples are spoilt, and the global batches passed over."""
SPOILT = set(sample_ids(SEED, BAD * BATCH, 3 * BATCH, SAMPLES).tolist())


def samples(spoilt: float) -> list[torch.Tensor]:
    """All samples; those of three steps are `spoilt`."""
    return [torch.tensor([spoilt if i in SPOILT else 1.0 + 0.01 * (i % 3)]) for i in range(SAMPLES)]


SKIPS = TrainingHealthConfig(
    on_loss_spike="skip_data", window_steps=8, spike_steps=2, skip_steps=SKIPPED
)


def trainer(
    storage: Path,
    *,
    replicas: int,
    steps: int,
    faults: str = "none",
    training: TrainingHealthConfig = SKIPS,
    lr: float = 1e-3,
    spoilt: float = 100.0,
) -> ElasticTrainer:
    return ElasticTrainer(
        TrainConfig(
            task=CustomTask(build_model=model, loss_function=summed_loss, dataset=samples(spoilt)),
            steps=steps,
            global_batch=BATCH,
            lanes=2,
            seed=SEED,
            optimizer=OptimizerConfig(lr=lr, min_lr_ratio=1.0),  # at any number of steps
        ),
        scaling=ScalingConfig(max_replicas=replicas, spares=replicas - 1),
        run_config=RunConfig(name="run", storage_path=str(storage)),
        checkpoint=CheckpointConfig(every_steps=5),
        health=HealthConfig(max_nonfinite_steps=2, training=training),
        faults=parse_faults(faults),
    )


def outcome(storage: Path) -> tuple[str, list[float]]:
    """The final parameters and the losses. Every step took the samples that it should have."""
    root = storage / "run"
    records = read_steps(root / "steps.jsonl")
    for record in records:
        batch = record.step if record.step < BAD else record.step + SKIPPED
        ids = sample_ids(SEED, BATCH * batch, BATCH, SAMPLES)
        expected = [sample_digest(np.array([number]), place) for place, number in enumerate(ids)]
        assert record.sample_digests == expected, record.step
    manifest = newest(open_store(root / "checkpoints"), Keys())
    assert manifest is not None and manifest.step == len(records)
    assert manifest.training_state["skips"] == [[BAD, SKIPPED]]
    weights = saved_weights(root / "checkpoints", manifest.step)
    return weights, [record.loss for record in records]


def events(storage: Path, kind: type[Any]) -> list[Any]:
    return [e for e in read_events(storage / "run" / "events.jsonl") if isinstance(e, kind)]


@pytest.mark.slow
def test_data_are_passed_over_with_the_same_bits_through_faults_and_a_later_start(
    cluster: None, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trainer(whole, replicas=1, steps=40).fit()
    trainer(broken, replicas=2, steps=34, faults="kill@22:1,kill@30:0").fit()
    assert len(events(broken, FaultFired)) == 2
    trainer(broken, replicas=1, steps=40).fit()  # goes on at step 34
    assert outcome(broken) == outcome(whole)
    assert max(outcome(whole)[1]) < 100.0, "no spoilt sample is in it"
    for storage in (whole, broken):
        (found,) = events(storage, TrainingTrouble)
        assert (found.trouble, found.first, found.last) == ("loss_spike", BAD, BAD + 1)
        (back,) = events(storage, WentBack)
        assert back.step <= BAD and back.skip == [BAD, SKIPPED]


@pytest.mark.slow
@pytest.mark.parametrize("action", ["warn", "skip_data"])
def test_steps_that_are_not_finite_are_told_of_or_passed_over_and_the_run_goes_on(
    cluster: None, tmp_path: Path, action: Literal["warn", "skip_data"]
) -> None:
    training = TrainingHealthConfig(
        on_nonfinite=action, window_steps=8, spike_steps=2, skip_steps=SKIPPED
    )
    trainer(tmp_path, replicas=1, steps=30, training=training, spoilt=math.nan).fit()
    (found,) = events(tmp_path, TrainingTrouble)
    told = (found.trouble, found.first, found.last, found.action)
    assert told == ("nonfinite", BAD, BAD + 1, action)
    if action == "skip_data":
        assert all(map(math.isfinite, outcome(tmp_path)[1])), "no spoilt sample is in it"
        return
    records = read_steps(tmp_path / "run" / "steps.jsonl")
    assert [r.step for r in records if not math.isfinite(r.loss)] == [BAD, BAD + 1, BAD + 2]
    assert len(records) == 30 and not events(tmp_path, WentBack)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actions", "lr"),
    [
        ({"on_loss_spike": "stop"}, 1e-3),
        ({"on_norm_spike": "stop"}, 1e-3),
        ({"on_no_progress": "stop", "progress_steps": 12}, 1e-12),
    ],
    ids=["loss_spike", "norm_spike", "no_progress"],
)
def test_a_run_ends_where_what_stands_out_is_to_end_it(
    cluster: None, tmp_path: Path, actions: dict[str, Any], lr: float
) -> None:
    """What stands out besides is told of, and no more. Of the spoilt samples loss and gradient
    stand out alike; at such a rate of learning no loss falls."""
    training = TrainingHealthConfig(window_steps=8, spike_steps=2, **actions)
    (knob,) = (name for name, action in actions.items() if action == "stop")
    with pytest.raises(RunFailedError, match=rf"health\.training\.{knob} is 'stop'") as caught:
        trainer(tmp_path, replicas=1, steps=200, training=training, lr=lr).fit()
    assert caught.value.cause == "user_error"
    found = {f"on_{e.trouble}": e.action for e in events(tmp_path, TrainingTrouble)}
    assert found == {"on_loss_spike": "warn", "on_norm_spike": "warn", knob: "stop"}
