from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from elastic import (
    CheckpointConfig,
    CustomTask,
    ElasticTrainer,
    ParallelConfig,
    S3Config,
    ScalingConfig,
    TrainConfig,
)
from elastic.driver.launch import Launch
from tests.support.run_plan import told_to_the_coordinator
from tests.support.tiny import tiny_task
from trainer.progress import listening

TASK = CustomTask(
    build_model=lambda: nn.Linear(3, 2),
    loss_function=lambda model, batch: (model(batch).sum(), 1),
    dataset=[0],
)


def test_the_records_tell_what_was_asked_for_not_what_had_room(tmp_path: Path) -> None:
    """Alerts go by it; more may come with the machines that an autoscaler brings."""
    train = TrainConfig(task=TASK, steps=1, global_batch=3)
    trainer = ElasticTrainer(train, scaling=ScalingConfig(max_replicas=3, spares=2))
    config = told_to_the_coordinator(trainer, tmp_path)
    assert (config.started.layout["replicas"], config.started.layout["spares"]) == (3, 2)
    assert config.groups.start_workers == 1


def test_the_records_tell_where_checkpoints_go_that_are_not_in_the_run_directory(
    tmp_path: Path,
) -> None:
    train = TrainConfig(task=TASK, steps=1, global_batch=1)

    def told(store: str | S3Config | None) -> tuple[str | None, dict[str, str]]:
        trainer = ElasticTrainer(train, checkpoint=CheckpointConfig(store=store))
        started = told_to_the_coordinator(trainer, tmp_path).started
        return started.store, started.store_settings

    url = "s3://bucket/runs"
    settings: dict[str, Any] = {"region": "eu-west-1", "expected_owner": "123456789012"}
    assert told(None) == ("", {})
    assert told(url) == (f"{url}/run", {})
    assert told(S3Config(url=url, **settings, part_bytes=8 << 20)) == (f"{url}/run", settings)


def test_the_records_tell_whether_tokens_are_counted(text: Path, tmp_path: Path) -> None:
    of_text = tiny_task(text)
    train = TrainConfig(task=of_text, steps=1, global_batch=1)
    prepared = of_text.prepare(train, str(tmp_path / "cache"))
    for task, terms in ((TASK, "terms"), (prepared, "tokens")):
        trainer = ElasticTrainer(TrainConfig(task=task, steps=1, global_batch=1))
        assert told_to_the_coordinator(trainer, tmp_path / terms).started.terms == terms


@pytest.mark.parametrize(
    ("parallel", "replicas", "told"),
    [
        (ParallelConfig(), 2, ("NO_SHARD", "True", "None")),
        (ParallelConfig(strategy="FULL_SHARD", shard=4), 1, ("FULL_SHARD", "True", "None")),
        (ParallelConfig(strategy="SHARD_GRAD_OP", shard=4), 1, ("SHARD_GRAD_OP", "False", "None")),
        (ParallelConfig(shard=4, reshard_after_forward=2), 2, ("HYBRID_SHARD", "2", "None")),
        (ParallelConfig(shard=4, workers_per_node=2), 2, ("HYBRID_SHARD", "True", "2")),
    ],
)
def test_the_records_tell_what_the_layout_comes_to(
    parallel: ParallelConfig, replicas: int, told: tuple[str, str, str], tmp_path: Path
) -> None:
    train = TrainConfig(task=TASK, steps=1, global_batch=8, parallel=parallel)
    trainer = ElasticTrainer(train, scaling=ScalingConfig(max_replicas=replicas))
    settings = told_to_the_coordinator(trainer, tmp_path).started.settings
    assert settings is not None
    names = "strategy", "reshard_after_forward", "workers_per_node"
    assert tuple(settings[name] for name in names) == told


def test_a_start_says_what_follows_for_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    train, said = TrainConfig(task=TASK, steps=1, global_batch=4), []
    with listening(lambda what, done, total: said.append(what)):
        for replicas in (1, 2):
            trainer = ElasticTrainer(train, scaling=ScalingConfig(max_replicas=replicas))
            Launch(**vars(trainer))._say_layout()
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split(":")[0] for text in warned + said] == ["layout", "layout"]
    assert len(warned) == 1, "one replica, whose loss costs steps"


@pytest.mark.parametrize(("replicas", "told"), [(2, False), (3, True)])
def test_a_start_warns_of_replicas_without_lanes(
    replicas: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig(task=TASK, steps=1, global_batch=4, lanes=2)
    trainer = ElasticTrainer(train, scaling=ScalingConfig(max_replicas=replicas))
    Launch(**vars(trainer))._say_layout()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert ["1 of 3 hold the state and compute nothing" in text for text in warnings] == [
        True
    ] * told
