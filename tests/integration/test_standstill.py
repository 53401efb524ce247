"""A worker that loops in its own code while its peers wait: it is found by what it has begun."""

from __future__ import annotations

import json
import re
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
from elastic.protocol.events import FaultFired, RegroupCalled, RunStarted, WorkerLost
from elastic.reporting.event_log import read_events
from tests.support.tiny import fit, tiny_trainer
from tests.support.user_code import model, slow_to_evaluate
from tests.support.watching import incidents_of

SOON = HealthConfig(progress_timeout_s=2.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault",
    [
        "loop@8.forward:3",  # its peers wait inside the replica and across replicas
        pytest.param("loop@8.data:0", marks=pytest.mark.soak),
        pytest.param("loop@8.optimizer:1", marks=pytest.mark.soak),
    ],
)
def test_the_worker_that_loops_is_ended_and_no_other(
    cluster: None, text: Path, tmp_path: Path, fault: str
) -> None:
    clean = tiny_trainer(text, tmp_path, name="clean", shard=2)
    broken = tiny_trainer(text, tmp_path, name="broken", shard=2, health=SOON, faults=fault)
    expected, outcome = fit(clean), fit(broken)
    assert (outcome.params, outcome.losses) == (expected.params, expected.losses)
    root = tmp_path / "broken"
    (lost,) = [
        event for event in read_events(root / "events.jsonl") if isinstance(event, WorkerLost)
    ]
    assert lost.cause == "hang"
    assert lost.slot == f"replica {int(fault[-1]) // 2} shard {int(fault[-1]) % 2} tensor 0"
    assert "it keeps the others: for" in lost.detail
    ((incident, manifest),) = incidents_of(root)
    assert list(manifest["accused"]) == [lost.worker]
    stacks = (incident / f"{lost.worker}.txt").read_text()
    assert stacks.count("in _fire") == 2, "suspected, then accused"
    assert len(list(incident.glob("*.txt"))) == 4, "the stacks of all"
    groups = manifest["stack_groups"]
    assert (groups["seen"], groups["workers"], groups["unread"]) == (4, 4, [])
    (alone,) = (each for each in groups["groups"] if lost.worker in each["workers"])
    assert alone["workers"] == [lost.worker] and "_fire" in alone["stack"][0]
    pending = manifest["pending_collectives"]
    waiters = [worker for worker in pending if worker != lost.worker]
    assert any(pending[worker] for worker in waiters), "what they wait in has not ended"
    told = next(each for each in manifest["not_arrived"] if lost.worker in each["absent"])
    assert told["in_words"].startswith(f"{lost.worker} has not begun ")
    assert set(told["waiting"]) < set(waiters) and told["in_words"] in lost.detail
    assert manifest["files"].keys() == {
        path.name for path in incident.iterdir() if path.name != "manifest.json"
    }
    assert lost.worker in json.loads((incident / "readings.json").read_text())


def test_a_worker_that_loops_in_an_evaluation_is_ended(cluster: None, tmp_path: Path) -> None:
    """In the last one, where the others are done. How long a batch takes is known by then."""
    samples = [torch.tensor([float(i)]) for i in range(16)]
    task = CustomTask(
        build_model=model,
        loss_function=slow_to_evaluate,
        dataset=samples,
        eval_dataset=samples[:4],
    )
    result = ElasticTrainer(
        TrainConfig(task=task, steps=10, global_batch=2, lanes=2, eval_every=4),
        scaling=ScalingConfig(max_replicas=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        health=SOON,
        faults=parse_faults("loop@10.evaluation:1"),
    ).fit()
    assert result.metrics is not None
    assert (result.metrics["outcome"], result.metrics["lost_steps"]) == ("finished", 0)
    events = read_events(tmp_path / "run" / "events.jsonl")
    (lost,) = [event for event in events if isinstance(event, WorkerLost)]
    assert [event for event in events if isinstance(event, FaultFired)]
    assert (lost.cause, lost.slot) == ("hang", "replica 1 shard 0 tensor 0")
    (stood,) = re.findall(
        r"for (\S+) s in phase evaluation of step 10, where 2.0 s are", lost.detail
    )
    assert float(stood) < 3.0, "of time in which it had a core: other tests may want that, too"


def test_nobody_is_accused_in_a_run_without_fault(
    cluster: None, text: Path, tmp_path: Path
) -> None:
    """With a bound that the start of a replica, and a busy machine's steps, are longer than."""
    low = HealthConfig(progress_timeout_s=1.0)
    fit(tiny_trainer(text, tmp_path, health=low, eval_every=4))
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event for event in events if isinstance(event, RunStarted)]
    assert not [event for event in events if isinstance(event, WorkerLost | RegroupCalled)]
    assert incidents_of(tmp_path / "run") == []
