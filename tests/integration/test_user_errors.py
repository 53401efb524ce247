"""Errors in user code, non-finite losses, and collectives that fail for ever end a run with what
the user needs to know, and soon."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import RunConfig
from torch import nn

from elastic import (
    CustomTask,
    ElasticTrainer,
    HealthConfig,
    RunFailedError,
    ScalingConfig,
    TrainConfig,
)
from elastic.cli.main import main
from elastic.exit_status import FAILED, RETRY_IS_USELESS
from elastic.membership.failure import plan_pause_s
from elastic.protocol.events import CrossGroupLost, LinksTested, RegroupDone, WorkerLost
from elastic.reporting.event_log import read_events
from tests.support.user_code import (
    Deciding,
    SpoiltSamples,
    endless_loss,
    failing_loss,
    loss_before_a_bad_link,
    model,
    putting_loss,
    summed_loss,
)
from tests.support.watching import wait_until

MOST_IN_VAIN = 4


GOOD = [torch.tensor([float(i)]) for i in range(8)]


def trainer(
    loss: object,
    storage: Path,
    dataset: object = GOOD,
    *,
    build: Callable[[], nn.Module] = model,
    **changes: Any,
) -> ElasticTrainer:
    task = CustomTask(
        build_model=build,
        loss_function=loss,  # type: ignore[arg-type]
        dataset=dataset,
    )
    return ElasticTrainer(
        TrainConfig(task=task, steps=8, global_batch=2, lanes=2, **changes),
        scaling=ScalingConfig(max_replicas=2),
        run_config=RunConfig(name="run", storage_path=str(storage)),
        health=HealthConfig(max_nonfinite_steps=3, max_regroups_without_progress=MOST_IN_VAIN),
    )


def test_a_bug_in_user_code_ends_the_run_with_the_users_traceback(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailedError) as caught:
        trainer(failing_loss, tmp_path).fit()
    assert "RuntimeError: gloo: sample 5 is not to my taste" in str(caught.value)
    assert "failing_loss" in str(caught.value)
    assert caught.value.cause == "user_error"
    assert main(["watch", str(tmp_path / "run")]) == RETRY_IS_USELESS
    assert "RuntimeError: gloo: sample 5" in capsys.readouterr().out
    assert "user code raised, 2 times at step" in str(caught.value)
    lost = [e for e in read_events(tmp_path / "run" / "events.jsonl") if isinstance(e, WorkerLost)]
    assert {event.cause for event in lost} == {"user_error"}
    kept = list((tmp_path / "run" / "incidents").glob("*/w*.log"))
    assert {path.stem for path in kept} == {event.worker for event in lost}, "the last one, too"
    assert all("RuntimeError: gloo: sample 5" in path.read_text() for path in kept)
    assert main(["logs", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out.splitlines()
    raised = [line for line in shown if "RuntimeError: gloo: sample 5" in line]
    slots = {event.worker: f"r{event.slot.split()[1]}.0" for event in lost if event.slot}
    assert {tuple(line.split(" ")[:2]) for line in raised} == {(s, w) for w, s in slots.items()}


def test_a_machine_that_does_not_see_the_run_is_named(cluster: None, tmp_path: Path) -> None:
    """Here it is gone from all of them by the time the workers are there."""
    told = tmp_path / "run" / "run.json"

    def hide() -> None:
        wait_until(told.exists)
        told.rename(tmp_path / "elsewhere")

    hiding = threading.Thread(target=hide)
    hiding.start()
    with pytest.raises(RunFailedError, match=rf"{told} is not there on machine \S+\. Mount it"):
        trainer(summed_loss, tmp_path).fit()
    hiding.join()


def test_an_operator_without_a_deterministic_way_ends_a_strict_run_by_its_name(
    cluster: None, tmp_path: Path
) -> None:
    with pytest.raises(RunFailedError, match=r"put_ does not have a deterministic implementation"):
        trainer(putting_loss, tmp_path / "strict").fit()
    trainer(putting_loss, tmp_path / "fast", determinism="fast").fit()


def test_a_block_that_cannot_be_compiled_ends_a_run_that_requires_it(
    cluster: None, tmp_path: Path
) -> None:
    with pytest.raises(RunFailedError, match=r"block blocks\.0 cannot be compiled: .*branching"):
        trainer(summed_loss, tmp_path / "require", build=Deciding, compile="require").fit()
    trainer(summed_loss, tmp_path / "on", build=Deciding, compile="on").fit()


@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_a_bug_in_a_dataset_does_so_too(
    cluster: None, tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(RunFailedError) as caught:
        trainer(summed_loss, tmp_path, SpoiltSamples(error)).fit()
    assert f"{error.__name__}: {error('sample 5 is spoilt')}" in str(caught.value)
    assert "__getitem__" in str(caught.value)
    assert "user code raised, 2 times at step" in str(caught.value)


def test_non_finite_steps_end_the_run_naming_step_and_samples(
    cluster: None, tmp_path: Path
) -> None:
    with pytest.raises(RunFailedError, match=r"3 steps in a row up to step 2 .*samples of step 2"):
        trainer(endless_loss, tmp_path).fit()


def test_collectives_that_fail_while_nobody_dies_end_the_run(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(
        RunFailedError,
        match=rf"{MOST_IN_VAIN} regroups in a row .*\. All connections .* good\.",
    ):
        trainer(loss_before_a_bad_link, tmp_path).fit()
    happened = read_events(tmp_path / "run" / "events.jsonl")
    assert not any(isinstance(e, WorkerLost) for e in happened)
    assert main(["watch", str(tmp_path / "run")]) == FAILED, "the link may be mended"
    told = [e for e in happened if isinstance(e, CrossGroupLost)]
    # Its peer, whose connection is closed, may be heard first: two processes send.
    assert "the link is bad" in {e.reason for e in told}
    assert len({e.generation for e in told}) == len(told) == MOST_IN_VAIN, "on one machine"
    tested = [e for e in happened if isinstance(e, LinksTested)]
    assert [e.count for e in tested] == [0] * (MOST_IN_VAIN - 2)
    stood = {e.generation: e.time for e in happened if isinstance(e, RegroupDone)}
    for n, event in enumerate(told):  # ever longer after their roster
        assert event.time - stood[event.generation] >= plan_pause_s(n)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["regroups"] == MOST_IN_VAIN - 1 and report["effective_time"] < 0.5
