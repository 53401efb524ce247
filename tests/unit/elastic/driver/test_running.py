"""What a driver makes of a run that goes on, and of its end; without Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import RunConfig
from torch import nn

from elastic import CustomTask, ElasticTrainer, TrainConfig
from elastic.config import WorkerPlan
from elastic.driver import launch, running
from elastic.driver.launch import Launch
from elastic.driver.observer import Observer
from elastic.driver.resume import run_directory
from elastic.driver.running import find_run, follow
from elastic.errors import RunFailedError, RunGoesOnError, RunStoppedError
from elastic.protocol.events import (
    BY_HAND,
    Event,
    RunEnded,
    RunOutcome,
    RunStarted,
    StopRequested,
)
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.supervisor_api import About, Ending, SupervisorApi
from elastic.ray_compat.kept import keep_stop
from elastic.reporting.event_log import EventLog
from tests.support.kept_in_memory import KeptInMemory
from tests.support.run_plan import ready_to_start, run_plan

STARTED = RunStarted(time=1.0, name="r", layout={}, steps=9, start_step=0, versions={})
FINISHED = RunEnded(time=2.0, step=9, outcome="finished", error=None)
TASK = CustomTask(
    build_model=lambda: nn.Linear(3, 2),
    loss_function=lambda model, batch: (model(batch).sum(), 1),
    dataset=[0],
)


@pytest.fixture(autouse=True)
def outside_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No actor is there to be ended."""
    monkeypatch.setattr(ray, "kill", lambda handle: None)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path / "run")


class Over(Remote[Any]):
    """The supervisor of a run that has ended."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(None)
        self.ending = ending

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self.ending


@pytest.mark.parametrize(
    ("interrupted", "recorded", "error", "says"),
    [
        (True, None, RunStoppedError, "was interrupted by somebody else after 0 steps"),
        (True, "interrupted", RunStoppedError, "was interrupted by somebody else"),
        (
            False,
            "stopped",
            RunStoppedError,
            "was stopped by somebody else .* unless it has resume=",
        ),
        (False, None, RunFailedError, r"do not say that it finished \(outcome: unfinished\)"),
        (False, "failed", RunFailedError, r"do not say that it finished \(outcome: failed\)"),
    ],
)
def test_a_run_is_done_only_where_it_is_known_to_have_finished(
    paths: RunPaths,
    interrupted: bool,
    recorded: RunOutcome | None,
    error: type[Exception],
    says: str,
) -> None:
    """Else a program goes on with a model that is half trained. The end of a run may be in no
    record: its coordinator was ended as it did not answer, and the storage refused."""
    with EventLog(paths.events) as log:
        log.append(STARTED)
        if recorded is not None:
            log.append(RunEnded(time=2.0, step=3, outcome=recorded, error=None))
    run = Over(Ending(error=None, interrupted=interrupted))
    with pytest.raises(error, match=says):
        follow(run, Remote(None), "run/", Observer(paths, ()))


def test_a_run_that_has_finished_is_done(paths: RunPaths) -> None:
    with EventLog(paths.events) as log:
        log.append(STARTED)
        log.append(FINISHED)
    report = follow(Over(Ending(error=None)), Remote(None), "run/", Observer(paths, ()))
    assert report.outcome == "finished"


class Leaving(Remote[Any]):
    """The supervisor of a run that is over once somebody has waited for its end."""

    def __init__(self, paths: RunPaths) -> None:
        super().__init__(None)
        self.job, self.over = run_plan(paths, Remote(None)).job, False
        self.end = Ending(error=None)
        self.waits: list[Callable[[], None]] = []
        """What happens while somebody waits, before the end."""

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is SupervisorApi.about:
            return About(job=self.job, task_info={})
        assert method is SupervisorApi.ending
        if self.waits:
            return self.waits.pop()()
        self.over = True
        return self.end


@pytest.mark.parametrize(
    ("told", "kept", "waits"),
    [
        ([STARTED], False, False),
        ([STARTED], True, True),
        ([STARTED, StopRequested(time=0.5, reason="SIGTERM")], False, True),
        ([STARTED, StopRequested(time=2.0, reason=BY_HAND)], False, False),
        ([StopRequested(time=0.5, reason="SIGTERM"), STARTED], False, False),
    ],
)
def test_a_driver_that_was_moved_goes_on_with_the_run_that_it_was_told_to_leave(
    paths: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    told: list[Event],
    kept: bool,
    waits: bool,
) -> None:
    """The platform that has ended it starts it again while the run still saves. Attached, it would
    end as if somebody had wanted that: with 93, and nobody would start it any more."""
    KeptInMemory(monkeypatch)
    with EventLog(paths.events) as log:
        for event in told:
            log.append(event)
    run = Leaving(paths)
    if kept:
        keep_stop(paths.prefix_of(run.job.attempt), "SIGTERM")
    monkeypatch.setattr(launch, "find_run", lambda _: None if run.over else run)
    assert launch._find_run_to_attach(paths, "auto") is (None if waits else run)
    run.over = False
    assert launch._find_run_to_attach(paths, "never") is run


def test_who_attaches_with_other_versions_is_told_that_the_run_keeps_its_own(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    mine = launch._versions()
    with EventLog(paths.events) as log:
        log.append(replace(STARTED, versions={**mine, "torch": "1.0.0"}))
        log.append(replace(STARTED, time=2.0, versions=mine))
    launch._tell_other_versions(paths)
    assert not caplog.messages
    with EventLog(paths.events) as log:
        log.append(replace(STARTED, time=3.0, versions={**mine, "torch": "1.0.0"}))
    launch._tell_other_versions(paths)
    (said,) = caplog.messages
    assert f"stopped and started again: torch 1.0.0, now {mine['torch']}" in said


def test_who_waits_for_such_a_run_leaves_it_where_somebody_ends_it(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `elastic stop` it is attached to again, and told as any that somebody stops."""
    KeptInMemory(monkeypatch)
    run, by_hand = Leaving(paths), StopRequested(time=3.0, reason=BY_HAND)
    monkeypatch.setattr(launch, "find_run", lambda _: None if run.over else run)
    with EventLog(paths.events) as log:
        log.append(STARTED)
        log.append(StopRequested(time=0.5, reason="SIGTERM"))
        run.end = Ending(error=None, interrupted=True)
        with pytest.raises(RunStoppedError, match="was interrupted by somebody else"):
            launch._find_run_to_attach(paths, "auto")
        run.over, run.waits = False, [lambda: log.append(by_hand)]
        assert launch._find_run_to_attach(paths, "auto") is run


@pytest.mark.parametrize("earlier", [[], [STARTED, FINISHED]])
def test_a_start_of_a_moment_ago_is_looked_for_before_anything_is_prepared(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, earlier: list[Event]
) -> None:
    """Its supervisor waits for the lock, and the run would end while another driver prepares: the
    records tell of a start once its coordinator is there."""
    KeptInMemory(monkeypatch)
    there = dict[str, Remote[Any]]()

    def start_actor(cls: Any, *, name: str, **options: Any) -> Callable[..., Remote[Any]]:
        return lambda *given: there.setdefault(name, Remote(None))

    monkeypatch.setattr(launch, "start_actor", start_actor)
    monkeypatch.setattr(launch, "find_run", lambda paths: there.get(paths.key))
    monkeypatch.setattr(launch, "wait_for_workers", lambda *_: WorkerPlan(replicas=1, spares=0))
    monkeypatch.setattr(launch, "most_on_a_node", lambda resource: 0.0)
    for asked in ("connect", "end_all", "check_nodes", "check_spares"):
        monkeypatch.setattr(launch, asked, lambda *_: None)
    run_config = RunConfig(name=paths.root.name, storage_path=str(paths.root.parent))
    trainer = ElasticTrainer(TrainConfig(task=TASK, steps=1, global_batch=1), run_config=run_config)
    first, second = Launch(**vars(trainer)), Launch(**vars(trainer))
    for event in earlier:
        with EventLog(paths.events) as log:
            log.append(event)
    with run_directory(run_config, trainer.checkpoint, first._claim):
        first._start(paths, ready_to_start(TASK))
    monkeypatch.setattr(second, "_prepare", lambda paths: pytest.fail("it holds the lock"))
    with pytest.raises(RunGoesOnError, match="has just been started"):
        second.fit(detach=False)
    began = replace(STARTED, time=float(paths.starting.read_text()))
    with EventLog(paths.events) as log:
        for event in (began, replace(FINISHED, time=began.time + 1.0)):
            log.append(event)
    monkeypatch.setattr(launch, "connect", lambda: pytest.fail("it is over: no cluster is needed"))
    second._claim(paths)


def test_a_supervisor_that_is_frozen_holds_up_nobody_for_ever(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit`, `elastic attach`, `stop` and `clear` would hang without a word."""
    asked = SimpleNamespace(remote=lambda: None)
    monkeypatch.setattr(running, "find_actor", lambda name: SimpleNamespace(going_on=asked))

    def get(answer: Any, timeout: float | None = None) -> None:
        assert timeout is not None, "it would never return"
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(RunGoesOnError, match="has not answered in 120 s"):
        find_run(paths)
