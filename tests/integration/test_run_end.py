"""The end of a run where something is amiss: on a real cluster, without training."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig
from ray.util.placement_group import placement_group

from checkpointing import open_memory
from elastic import CustomTask, ElasticTrainer, HealthConfig, TrainConfig
from elastic.cli.main import main
from elastic.coordinator.actor import Coordinator
from elastic.driver.observer import Observer
from elastic.driver.running import await_end, find_run, follow
from elastic.errors import RunFailedError, RunStoppedError
from elastic.protocol.causes import USER_ERROR
from elastic.protocol.events import CoordinatorStarted, Event, RunEnded, RunOutcome
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths, hold_run
from elastic.ray_compat.cluster import end_actors, named_actors, start_actor
from elastic.ray_compat.kept import Kept
from elastic.ray_compat.workers import WorkerNames
from elastic.reporting.event_log import EventLog, read_events
from elastic.supervisor import supervisor
from health import questions
from tests.support.run_end import (
    Cleaner,
    Deaf,
    Ended,
    GoingOn,
    Interrupted,
    OfRun,
    StandingWorker,
    StuckAtTheEnd,
    Told,
)
from tests.support.run_plan import run_plan, told_to_the_coordinator
from tests.support.user_code import model, summed_loss
from tests.support.watching import wait_until


@pytest.fixture
def damaged(tmp_path: Path) -> RunPaths:
    paths = RunPaths(root=tmp_path / "run")
    paths.root.mkdir()
    paths.steps.mkdir()  # nobody can read that
    return paths


def test_records_that_cannot_be_read_hide_no_failure(cluster: None, damaged: RunPaths) -> None:
    run: Any = start_actor(Ended, max_concurrency=10)("user code raised")
    with pytest.raises(RunFailedError, match="user code raised") as failed:
        follow(run, Remote(None), "run/", Observer(damaged, ()))
    assert failed.value.cause == USER_ERROR
    assert isinstance(failed.value.__cause__, OSError)
    wait_until(lambda: is_gone(run), 20)


def is_gone(run: Any) -> bool:
    """Whether the actor has ended: Ray kills in a moment, not at once."""
    try:
        run.call(Ended.going_on)
    except ray.exceptions.RayActorError:
        return True
    return False


def test_of_a_run_that_went_well_they_are_told(cluster: None, damaged: RunPaths) -> None:
    run: Any = start_actor(Ended, max_concurrency=10)(None)
    with pytest.raises(OSError):
        follow(run, Remote(None), "run/", Observer(damaged, ()))


@pytest.mark.parametrize("outcome", ["stopped", "interrupted", "finished"])
def test_who_follows_a_run_that_somebody_else_stops_does_not_take_it_for_done(
    cluster: None, tmp_path: Path, outcome: RunOutcome
) -> None:
    """Else its program goes on with a model that is not trained."""
    paths = RunPaths(root=tmp_path / "run")
    with EventLog(paths.events) as log:
        log.append(RunEnded(time=1.0, step=3, outcome=outcome, error=None))
    run: Any = start_actor(Ended, max_concurrency=10)(None)
    if outcome == "finished":
        assert follow(run, Remote(None), "run/", Observer(paths, ())).outcome == outcome
        return
    with pytest.raises(RunStoppedError, match=f"was {outcome} by somebody else"):
        follow(run, Remote(None), "run/", Observer(paths, ()))
    assert (paths.root / "report.json").exists()


def test_a_second_ctrl_c_is_a_ctrl_c_also_where_the_supervisor_is_gone(
    cluster: None, tmp_path: Path
) -> None:
    paths = RunPaths(root=tmp_path / "run")
    with EventLog(paths.events) as log:
        log.append(RunEnded(time=1.0, step=3, outcome="interrupted", error=None))
    run = Interrupted(start_actor(GoingOn, max_concurrency=10)(None).handle)
    ray.kill(run.handle)
    with pytest.raises(KeyboardInterrupt):
        follow(run, Remote(None), "run/", Observer(paths, ()))
    assert (paths.root / "report.json").exists()


@pytest.mark.parametrize(
    ("error", "outcome", "status", "says"),
    [
        ("user code raised", None, 93, "the run failed: user code raised"),
        (None, "interrupted", 0, "has stopped"),
        (None, "finished", 0, "was over already"),
        (None, None, 1, "its supervisor was ended"),
    ],
)
def test_a_run_that_is_asked_to_stop_may_have_failed_or_ended(
    cluster: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: str | None,
    outcome: RunOutcome | None,
    status: int,
    says: str,
) -> None:
    paths = RunPaths(root=tmp_path / "run")
    start_actor(GoingOn, max_concurrency=10, name=paths.key)(error)
    if outcome is not None:
        with EventLog(paths.events) as log:
            log.append(RunEnded(time=1.0, step=3, outcome=outcome, error=None))
    address = ray.get_runtime_context().gcs_address
    assert main(["stop", str(paths.root), "--now", "--address", address]) == status
    out, err = capsys.readouterr()
    assert out.startswith("asking the run to stop at once")
    assert says in out + err
    end_actors(paths.key)


def test_whoever_looks_at_a_run_that_has_just_ended_leaves_it_its_report(
    cluster: None, tmp_path: Path
) -> None:
    paths = RunPaths(root=tmp_path / "run")
    start_actor(Ended, max_concurrency=10, name=paths.key)(None)
    address = ray.get_runtime_context().gcs_address
    assert main(["stop", str(paths.root), "--address", address]) == 2
    assert named_actors(paths.key) == [paths.key]
    assert find_run(paths) is None and named_actors(paths.key) == []


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (None, "run, which has no events.jsonl. Name a run's directory."),
        (RunEnded(time=1.0, step=3, outcome="failed", error="e"), "run: it failed after 3 steps"),
        (CoordinatorStarted(time=1.0, pid=1, anew=False), "the run is not on this cluster"),
    ],
)
def test_where_no_run_is_going_on_the_records_say_why(
    cluster: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    last: Event | None,
    says: str,
) -> None:
    paths = RunPaths(root=tmp_path / "run")
    if last is not None:
        with EventLog(paths.events) as log:
            log.append(last)
    address = ray.get_runtime_context().gcs_address
    assert main(["stop", str(paths.root), "--address", address]) == 2
    assert says in capsys.readouterr().err


def test_the_snapshots_of_a_run_that_is_over_are_cleared_by_hand(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(root=tmp_path / "run")
    address = ray.get_runtime_context().gcs_address
    command = ["clear", str(paths.root), "--address", address]
    assert main(command) == 2
    assert "no run's directory" in capsys.readouterr().err
    with EventLog(paths.events) as log:
        log.append(RunEnded(time=1.0, step=3, outcome="failed", error="e"))
    node = ray.get_runtime_context().get_node_id()
    open_memory(paths.memory, node).put("m/1.json", [b"whatever"])
    start_actor(GoingOn, max_concurrency=10, name=paths.key)(None)
    assert main(command) == 2
    assert "is going on, and may need them" in capsys.readouterr().err
    end_actors(paths.key)
    start_actor(GoingOn, max_concurrency=10, name=f"{paths.key}/1/coordinator")(None)
    assert main(command) == 2
    assert "is going on, and may need them" in capsys.readouterr().err
    end_actors(paths.key)
    wait_until(lambda: not named_actors(paths.key), 20)
    with hold_run(paths):
        assert main(command) == 2
    assert paths.memory.exists() and "is locked" in capsys.readouterr().err
    assert main(command) == 0
    assert not paths.memory.exists()
    assert "on 1 of 1 nodes; 0 had none" in capsys.readouterr().out
    assert main(command) == 0
    assert "as the run's machines see it" in capsys.readouterr().out


def test_who_attaches_to_a_run_has_its_lanes(cluster: None, tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path / "run")
    with EventLog(paths.events) as log:
        log.append(CoordinatorStarted(time=1.0, pid=1, anew=False))
    job = run_plan(paths, Remote(None)).job
    start_actor(OfRun, max_concurrency=10, name=paths.key)(replace(job, lanes=7))
    task = CustomTask(build_model=model, loss_function=summed_loss, dataset=[0])
    trainer = ElasticTrainer(
        replace(job.train, task=task),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    )
    assert trainer.lanes == 1
    trainer.fit(detach=True)
    assert trainer.lanes == 7
    end_actors(paths.key)


def test_a_supervisor_that_fails_has_the_end_written_down(cluster: None, tmp_path: Path) -> None:
    """Else whoever watches waits for steps."""
    paths = RunPaths(root=tmp_path / "run")
    coordinator: Any = start_actor(Told, max_concurrency=10)()
    unusable = RunConfig(name="run", storage_path="not/absolute")  # for Ray Train's controller
    plan = replace(run_plan(paths, coordinator), run_config=unusable)
    kept = Kept.keep(f"{plan.prefix}plan", plan)
    run: Any = start_actor(supervisor.Supervisor, max_concurrency=10, name=paths.key)(kept)
    ending = await_end(run, paths)
    assert ending.error is not None and "supervisor failed" in ending.error
    assert "not/absolute" in ending.error
    assert ray.get(coordinator.send(Told.all_ends)) == [("failed", ending.error)]
    end_actors(paths.key)
    ray.kill(coordinator.handle)  # the plan has its handle, too


def test_a_coordinator_that_is_stuck_as_it_writes_down_the_end_is_started_anew(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run keeps its machines, and everybody waits."""
    monkeypatch.setattr(questions, "ANSWER_S", 0.6)
    monkeypatch.setattr(supervisor, "LINGER_S", 0.0)
    monkeypatch.setattr(supervisor, "started_anew", lambda: False)  # this process is no actor
    left = threading.Event()
    monkeypatch.setattr(supervisor, "end_own_actor", left.set)
    coordinator: Any = start_actor(StuckAtTheEnd, max_concurrency=10, restarts=True)()
    unusable = RunConfig(name="run", storage_path="not/absolute")
    plan = replace(run_plan(RunPaths(root=tmp_path / "run"), coordinator), run_config=unusable)
    run = supervisor.Supervisor(Kept.keep(f"{plan.prefix}plan", plan))
    ending = asyncio.run(run.ending(60.0))
    assert ending is not None and ending.error is not None and left.wait(20.0)
    assert ray.get(coordinator.send(Told.all_ends)) == [("failed", ending.error)]
    ray.kill(coordinator.handle)  # the plan has its handle, too


def test_a_run_that_is_interrupted_does_not_wait_for_its_coordinator(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_HEARD_S", 1.0)
    monkeypatch.setattr(supervisor, "_FAREWELL_S", 0.0)
    coordinator: Any = start_actor(Deaf, max_concurrency=10)()
    name = f"{WorkerNames('run/').workers}group/0/1"
    worker = start_actor(StandingWorker, max_concurrency=1, name=name)()
    asked = coordinator.send(Deaf.fail, "the controller asks, too")
    supervisor.end_at_once(coordinator, "run/")
    for answer in (asked, worker.send(StandingWorker.pid)):
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(answer, timeout=20)
    wait_until(lambda: not named_actors("run/"), 20)


def test_a_coordinator_that_has_neither_supervisor_nor_workers_ends(
    cluster: None, tmp_path: Path
) -> None:
    """The driver was lost as it started them, or the supervisor does not start anywhere."""
    prefix, task = "alone/", CustomTask(build_model=model, loss_function=summed_loss, dataset=[0])
    trainer = ElasticTrainer(
        TrainConfig(task=task, steps=1, global_batch=1),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    )
    config = replace(
        told_to_the_coordinator(trainer, tmp_path),
        prefix=prefix,
        health=HealthConfig(supervisor_timeout_s=1.0),
    )
    start_actor(Coordinator, max_concurrency=10, restarts=True, name=f"{prefix}coordinator")(
        Kept.keep(f"{prefix}config", config)
    )
    wait_until(lambda: not named_actors(prefix), 60)
    ended = read_events(config.paths.events)[-1]
    assert isinstance(ended, RunEnded) and "its supervisor was not heard" in (ended.error or "")


def test_an_actor_of_the_run_ends_itself_last(cluster: None) -> None:
    """Else placement groups, which hold machines, stay for good."""
    prefix = "cleaned/"
    kept = Kept.keep(f"{prefix}plan", 1)
    start_actor(StandingWorker, max_concurrency=1, name=f"{prefix}worker/group/0/1")()
    placement_group([{"CPU": 1}], name=f"{prefix}group/0", lifetime="detached")
    cleaner = start_actor(Cleaner, max_concurrency=1, name=f"{prefix}coordinator")(prefix)
    ray.get(cleaner.send(Cleaner.clear_up))
    own = [f"{prefix}coordinator"]
    wait_until(lambda: ray.get(cleaner.send(Cleaner.what_is_left)) == own, 20)
    with pytest.raises(KeyError):
        kept.value  # noqa: B018
    cleaner.send(Cleaner.leave)
    wait_until(lambda: not named_actors(prefix), 20)
