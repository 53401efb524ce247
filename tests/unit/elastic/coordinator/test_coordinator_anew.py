"""What a coordinator that is started anew makes of the records, before any worker has spoken."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import shutil
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from checkpointing import (
    Attempt,
    CheckpointError,
    Keys,
    Receipt,
    StoreUnavailableError,
    TensorSlice,
    commit,
    list_steps,
    open_store,
    write_shared,
)
from elastic.coordinator import actor, corruption, run_log
from elastic.coordinator.actor import Coordinator
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.corruption import Done
from elastic.coordinator.retreat import Retreat
from elastic.protocol import events
from elastic.protocol.causes import HANG, USER_ERROR
from elastic.protocol.coordinator_api import UnheardError
from elastic.protocol.messages import Build, Identity, Report, Signal, Standing, Stop
from elastic.protocol.run_identity import RunIdentity, record_identity
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.kept import keep_stop
from elastic.reporting.event_log import EventLog, events_to_go_on_from, read_events, read_steps
from elastic.training_config import Action, TrainingHealthConfig
from tests.support.coordinator_desk import CoordinatorDesk
from tests.support.kept_in_memory import KeptInMemory
from tests.support.tiny_checkpoint import NUMBERS

STOP = events.StopRequested(time=1.0, reason="SIGINT")
BEGUN = events.RegroupDone(
    time=2.0, generation=1, step=0, replicas=3, lanes={}, outcome="start",
    renumbered={}, lost_steps=0, repeated_steps=0,
)  # fmt: skip

RESTORED = replace(BEGUN, time=5.0, generation=3, step=2, outcome="restore")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CoordinatorConfig:
    """Of a run whose coordinator was lost."""
    monkeypatch.setattr(actor, "started_anew", lambda: True)
    config = CoordinatorDesk(tmp_path).config
    record_identity(config.paths, config.identity)
    return config


def write(
    config: CoordinatorConfig,
    *happened: events.Event,
    steps: int = 0,
    high: Sequence[int] = (),
    generation: int = 1,
) -> None:
    """The records of so many steps, of which some have a `high` loss."""
    with EventLog(config.paths.events) as log:
        for event in happened:
            log.append(event)
    with EventLog(config.paths.steps) as log:
        for step in range(steps):
            log.append(
                events.StepRecord(
                    step=step,
                    loss=9.0 if step in high else 1.0,
                    grad_norm=1.0,
                    lr=0.1,
                    tokens=8,
                    time=3.0,
                    generation=generation,
                    replicas=3,
                    sample_digests=[1],
                )
            )


def kinds(happened: Sequence[events.Event]) -> list[str]:
    return [event.kind for event in happened]


def test_one_that_was_lost_before_it_wrote_a_line_begins_the_run(
    config: CoordinatorConfig,
) -> None:
    before = events.RunStarted(time=-9.0, name="r", layout={}, steps=30, start_step=0, versions={})
    joined = events.WorkerJoined(time=0.0, worker="old", node="n", pid=1, born_ticks=1)
    write(config, before, joined, STOP, BEGUN)
    coordinator = Coordinator(config)

    async def ask() -> int:
        await coordinator.known()  # waits for nobody
        return await coordinator.hellos()

    assert asyncio.run(ask()) == 0, "the worker was of the start before"
    begun = read_events(config.paths.events)[4:]
    assert kinds(begun) == ["run_started", "coordinator_started"]


def test_who_has_not_said_hello_is_known_once_the_run_is(config: CoordinatorConfig) -> None:
    write(config, config.started, BEGUN)
    coordinator = Coordinator(config)
    identity = Identity(worker="w", rank=0, node="n", pid=1)

    async def run() -> None:
        asked = [("n", 1), ("n", 2), ("m", 1)]
        assert await coordinator.silent(asked) is None
        await coordinator.known()  # waits for nobody
        coordinator._workers.started["w"] = identity
        assert await coordinator.silent(asked) == [("n", 2), ("m", 1)]

    asyncio.run(run())


@pytest.mark.parametrize("there", [None, RunIdentity(id="another")])
def test_one_that_does_not_see_the_run_directory_waits_for_it(
    config: CoordinatorConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: RunIdentity | None,
) -> None:
    """It is not mounted where Ray has started it: the first one of a run would be as blind."""
    write(config, config.started, BEGUN)
    unmounted, mounted = RunPaths(root=tmp_path / "unmounted"), config.paths.root
    if there is not None:
        record_identity(unmounted, there)
    before = sorted(tmp_path.rglob("*"))

    def mount(seconds: float) -> None:
        assert sorted(tmp_path.rglob("*")) == before, "what it makes there, the mount would hide"
        shutil.rmtree(unmounted.root, ignore_errors=True)
        unmounted.root.symlink_to(mounted)

    monkeypatch.setattr(time, "sleep", mount)
    Coordinator(replace(config, paths=unmounted))
    assert kinds(read_events(config.paths.events)[-2:]) == ["regroup_done", "coordinator_started"]
    assert unmounted.root.is_symlink()


def test_one_passes_damaged_lines_over_and_waits_for_a_storage_that_refuses(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step needed it, and the run is well."""
    write(config, config.started, BEGUN, STOP, steps=4)
    for path in (config.paths.events, config.paths.steps):
        *whole, last = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*whole, b"damaged\n", last, b"damaged\n"]))
    refused = set[tuple[str, ...]]()

    def refuses_once(self: Path, *args: Any, **how: Any) -> Any:
        callers = tuple(frame.name for frame in traceback.extract_stack(limit=5))
        if config.paths.root in self.parents and callers not in refused:
            refused.add(callers)
            raise OSError(errno.ESTALE, "Stale file handle", str(self))
        return open(self, *args, **how)

    monkeypatch.setattr(Path, "open", refuses_once)
    monkeypatch.setattr(actor, "_STORAGE_RETRY_S", 0.0)
    coordinator = Coordinator(config)
    monkeypatch.undo()
    assert len(refused) >= 7, "two files are read in five places, and opened to be written"
    asyncio.run(coordinator.end("finished", None))
    ended = read_events(config.paths.events, lenient=True)[-1]
    assert isinstance(ended, events.RunEnded)
    assert (ended.outcome, ended.step) == ("stopped", 4)


@pytest.mark.parametrize(("since", "wanted"), [([], True), ([RESTORED], False)])
def test_a_checkpoint_that_was_cut_off_is_still_wanted(
    config: CoordinatorConfig, since: list[events.Event], wanted: bool
) -> None:
    """The machine of the fault may have been the coordinator's, too."""
    cut_off = replace(
        BEGUN, time=4.0, generation=2, step=4, outcome="finish_step", save_cut_off=True
    )
    write(config, config.started, BEGUN, cut_off, *since, steps=7)
    coordinator = Coordinator(config)
    assert coordinator._save_wish.wanted() == wanted
    asyncio.run(coordinator.end("finished", None))


def test_one_that_was_written_off_and_speaks_late_is_called_away(
    config: CoordinatorConfig,
) -> None:
    """It waits for a call later than those of the coordinator that was lost."""
    lost = events.WorkerLost(
        time=3.0, worker="a", node="A", pid=1, slot=None, cause=HANG, detail="it stood still"
    )
    write(config, config.started, BEGUN, lost)

    async def hear() -> Signal | None:
        coordinator = Coordinator(config)
        await coordinator.known()
        identity = Identity(worker="a", rank=0, node="A", pid=1)
        await coordinator.resume(Standing(identity=identity, formed=1, generation=1, serial=3))
        signal = await asyncio.wait_for(coordinator.watch("a", 3), 10.0)
        await coordinator.end("interrupted", None)
        return signal

    signal = asyncio.run(hear())
    assert signal is not None and signal.serial > 3 and signal.kind == "fault"


def test_what_fails_in_steps_that_are_given_up_does_not_end_the_run(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are not finite are what it goes back for."""
    monkeypatch.setattr(actor, "started_anew", lambda: False)
    found = threading.Event()
    monkeypatch.setattr(Retreat, "_find", lambda *_: (found.wait(10.0), (0, []))[1])

    async def scene() -> list[Stop | None]:
        coordinator = Coordinator(config)
        coordinator._membership.members["a"] = Identity(worker="a", rank=0, node="A", pid=1)
        told = list[Stop | None]()

        async def fail(generation: int | None) -> None:
            await coordinator.fail("not finite", "a", USER_ERROR, generation)
            told.append(await coordinator.verdict())

        going = asyncio.create_task(coordinator._retreat.go_back(at_most=0, reason="a spike"))
        await asyncio.sleep(0)
        await fail(0)
        found.set()
        await going
        await fail(0)  # no roster has stood since
        coordinator._membership.progress.begin(0, back=True)
        await fail(7)
        await fail(0)
        await coordinator.end("failed", "not finite")
        return told

    *ignored, stop = asyncio.run(scene())
    assert ignored == [None] * 3
    assert stop == Stop(error="not finite", cause=USER_ERROR)


def test_an_end_that_workers_were_told_of_is_the_end(config: CoordinatorConfig) -> None:
    """They have left: whoever was seated in their place would begin with fresh budgets."""
    decided = events.EndDecided(time=4.0, error="3 hangs", cause=HANG)
    write(config, config.started, BEGUN, decided, steps=4)

    async def ask() -> Stop | None:
        coordinator = Coordinator(config)
        stop = await coordinator.verdict()
        await coordinator.end("failed", "3 hangs")
        return stop

    assert asyncio.run(ask()) == Stop(error="3 hangs", cause=HANG)
    *_, ended = happened = read_events(config.paths.events)
    assert isinstance(ended, events.RunEnded)
    assert (ended.error, ended.cause, ended.step) == ("3 hangs", HANG, 4)
    assert kinds(happened).count("end_decided") == 1


def test_one_whose_records_are_gone_ends_what_it_does_not_know(config: CoordinatorConfig) -> None:
    """It would have all begin from the seed."""

    async def hear() -> Stop | None:
        coordinator = Coordinator(config)
        identity = Identity(worker="a", rank=0, node="A", pid=1)
        await coordinator.resume(Standing(identity=identity, formed=1, built=True))
        assert await coordinator.verdict() is None, "no roster stood, and nothing was done"
        await coordinator.resume(Standing(identity=identity, formed=1, built=True, generation=1))
        return await coordinator.verdict()

    config.paths.events.unlink()
    stop = asyncio.run(hear())
    assert stop is not None and stop.error is not None
    assert f"found nothing of this start of the run in {config.paths.events}" in stop.error


def test_one_that_is_lost_after_the_end_leaves_it_the_last_word(
    config: CoordinatorConfig,
) -> None:
    ended = events.RunEnded(time=3.0, step=4, outcome="failed", error="too many crashes")
    write(config, config.started, BEGUN, ended)
    coordinator = Coordinator(config)

    async def end() -> Stop | None:
        await coordinator.end("finished", None)
        return await coordinator.verdict()

    assert asyncio.run(end()) == Stop(error="too many crashes")
    assert read_events(config.paths.events)[-1] == ended


def test_a_stop_is_known_to_an_end_that_comes_before_the_workers(
    config: CoordinatorConfig,
) -> None:
    write(config, config.started, BEGUN, STOP, steps=4)
    asyncio.run(Coordinator(config).end("finished", None))
    ended = read_events(config.paths.events)[-1]
    assert isinstance(ended, events.RunEnded)
    assert (ended.outcome, ended.step) == ("stopped", 4)


@pytest.mark.parametrize("first", [True, False])
def test_a_stop_that_no_coordinator_could_take_is_taken_by_the_next_one(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Its driver was killed meanwhile. The next start of the run goes on."""
    KeptInMemory(monkeypatch)
    keep_stop(config.prefix, "SIGTERM")
    monkeypatch.setattr(actor, "is_actor", lambda: True)
    monkeypatch.setattr(actor, "export_actors", lambda *_: None)
    if first:
        monkeypatch.setattr(actor, "started_anew", lambda: False)
    else:
        write(config, config.started, BEGUN, steps=4)

    async def stopped(of_start: CoordinatorConfig) -> bool:
        coordinator = Coordinator(of_start)
        if asked := coordinator._membership.winding_down:
            for reason in ("SIGINT", events.BY_HAND):
                await coordinator.wind_down(reason)
        await coordinator.end("finished", None)
        return asked

    assert asyncio.run(stopped(config))
    happened = read_events(config.paths.events)
    assert [e.reason for e in happened if isinstance(e, events.StopRequested)] == [
        "SIGTERM",
        events.BY_HAND,  # somebody wants it now
    ]
    assert kinds(happened)[0] == "run_started"
    monkeypatch.setattr(actor, "started_anew", lambda: False)
    assert not asyncio.run(stopped(replace(config, prefix="run/2/")))


async def record_on_a_slow_disk(config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, begun, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    fdatasync = os.fdatasync

    def waits(fd: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(60.0)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", waits)
    coordinator = Coordinator(config)
    told = events.Evaluated(time=3.0, step=4, val_loss=1.0, tokens=8)
    answer = asyncio.create_task(coordinator.record([], [told]))
    begins = asyncio.create_task(begun.wait())
    await asyncio.wait((answer, begins), return_when=asyncio.FIRST_COMPLETED)
    assert not answer.done(), "the next coordinator may know nothing of it"
    assert read_events(config.paths.events)[-1] == told
    assert await coordinator.verdict() is None, "nobody else waits for the disk"
    may_end.set()
    assert (await answer).steps == 0
    await coordinator.end("finished", None)


def test_what_it_answers_to_is_on_the_disk_before(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers let go of what it has; its machine may be lost, with what was on its way to the
    storage."""
    asyncio.run(record_on_a_slow_disk(config, monkeypatch))


async def end_on_a_slow_disk(config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, fdatasync = threading.Event(), os.fdatasync

    def waits(fd: int) -> None:
        assert may_end.wait(60.0)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", waits)
    coordinator = Coordinator(config)
    end = asyncio.create_task(coordinator.end("finished", None))
    while not isinstance(read_events(config.paths.events)[-1], events.RunEnded):
        await asyncio.sleep(0.001)
    await coordinator.awake()
    again = asyncio.create_task(coordinator.end("finished", None))
    await asyncio.sleep(0.01)
    assert not end.done() and not again.done(), "either says that the end is durable"
    may_end.set()
    await asyncio.gather(end, again)


def test_the_supervisor_is_answered_while_the_end_waits_for_the_storage(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the coordinator for stuck."""
    asyncio.run(end_on_a_slow_disk(config, monkeypatch))


def test_storage_that_never_answers_holds_no_end(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor waits for it before it lets the machines go."""
    answers = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda fd: answers.wait(60.0))
    monkeypatch.setattr(run_log, "CLOSE_S", 0.01)
    try:
        asyncio.run(Coordinator(config).end("finished", None))
        assert not answers.is_set()
        assert isinstance(read_events(config.paths.events)[-1], events.RunEnded)
    finally:
        answers.set()


def test_what_is_told_again_is_written_down_once(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost, or the coordinator between its record and its answer."""
    first, second, third = (
        events.Evaluated(time=3.0 + step, step=step, val_loss=1.0, tokens=8) for step in range(3)
    )

    async def tell(*happened: events.Event) -> None:
        coordinator = Coordinator(config)
        coordinator._dispatcher.ready.set()  # nobody is waited for
        await coordinator.record([], list(happened))
        await coordinator.record([], list(happened))

    with monkeypatch.context() as begins:
        begins.setattr(actor, "started_anew", lambda: False)
        asyncio.run(tell(first, second))
    asyncio.run(tell(second, third))
    told = [e for e in read_events(config.paths.events) if isinstance(e, events.Evaluated)]
    assert told == [first, second, third]


def test_what_is_found_in_steps_is_told_after_what_a_worker_tells_of_them(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run stops for five steps, and then they are skipped."""
    monkeypatch.setattr(actor, "started_anew", lambda: False)
    write(config, steps=5, generation=0)
    spoilt = [
        replace(step, loss=math.nan, grad_norm=math.nan) for step in read_steps(config.paths.steps)
    ]
    skipped = [
        events.StepSkipped(time=3.0 + one.step, step=one.step, loss=one.loss, grad_norm=math.nan)
        for one in spoilt
    ]
    config.paths.steps.unlink()

    async def tell() -> None:
        await Coordinator(config).record(spoilt, list(skipped))

    asyncio.run(tell())
    told = kinds(read_events(config.paths.events))
    found = told.index("training_trouble")
    assert told[found - 5 : found] == ["step_skipped"] * 5


def test_who_came_to_other_gradients_is_seen_before_a_comparison_confirms_the_steps(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may come in one call: who was wrong would be forgotten, and stay."""
    monkeypatch.setattr(actor, "started_anew", lambda: False)
    write(config, steps=5, generation=0)
    again = read_steps(config.paths.steps)
    config.paths.steps.unlink()
    compared = events.ReplicasCompared(time=9.0, step=5, equal=True)
    first, seen = Done(gradients=b"others than again", workers={}), list[Done]()

    def decide(one: Done, _: Done) -> tuple[str, ...]:
        seen.append(one)
        return ()

    monkeypatch.setattr(corruption, "decide_culprits", decide)

    async def tell() -> None:
        coordinator = Coordinator(config)
        watch = coordinator._corruption
        watch._remembers, watch._disputed, watch._first = True, 5, {2: first}
        await coordinator.record(again, [compared])
        assert watch._disputed is None, "the comparison has confirmed what was done again"

    asyncio.run(tell())
    assert seen == [first]


def test_one_asks_who_calls_it_before_it_has_said_where_it_stands(
    config: CoordinatorConfig,
) -> None:
    """It had been answered its hello, and was in no call when the last one was lost: it would have
    waited here for calls until it was ended as silent."""
    joined = events.WorkerJoined(time=1.0, worker="a", node="A", pid=1, born_ticks=1)
    write(config, config.started, joined)
    coordinator = Coordinator(config)
    with pytest.raises(UnheardError):
        asyncio.run(coordinator.watch("a", 0))
    asyncio.run(coordinator.end("interrupted", None))


@pytest.mark.parametrize("action", ["skip_data", "stop"])
def test_what_one_before_it_found_of_the_training_and_had_no_time_for_is_done(
    config: CoordinatorConfig, action: Literal["skip_data", "stop"]
) -> None:
    """A finding is told once, with the step that completes it, which is in the records."""
    trouble = events.TrainingTrouble(
        time=4.0, trouble="loss_spike", first=2, last=3, detail="it is high", action=action
    )
    write(config, config.started, BEGUN, trouble, steps=5)

    async def go_on() -> Stop | None:
        coordinator = Coordinator(config)
        membership, retreat = coordinator._membership, coordinator._retreat
        await coordinator.known()
        while not (membership.stopped or membership.progress.going_back) or retreat._going:
            await asyncio.sleep(0.001)
        stop = await coordinator.verdict()
        await coordinator.end("interrupted", None)
        return stop

    stop = asyncio.run(asyncio.wait_for(go_on(), 10.0))
    happened = read_events(config.paths.events)
    assert kinds(happened).count("training_trouble") == 1, "it is told once"
    back = [(e.step, e.skip) for e in happened if isinstance(e, events.WentBack)]
    if action == "skip_data":
        assert stop is None and back == [(0, [2, config.health.training.skip_steps])]
    else:
        assert stop is not None and "step 3: it is high" in str(stop.error) and not back


SPIKE = [10, 11]
"""Steps whose loss is high, where two in a row are a finding."""


def watching(config: CoordinatorConfig, action: Action) -> CoordinatorConfig:
    training = TrainingHealthConfig(window_steps=8, spike_steps=2, on_loss_spike=action)
    return replace(config, health=replace(config.health, training=training))


@pytest.mark.parametrize("action", ["warn", "skip_data", "stop"])
def test_what_a_step_shows_that_is_recorded_is_told_where_one_before_it_did_not(
    config: CoordinatorConfig, action: Action
) -> None:
    """It was killed between the line of the step and that of the finding: nobody sends the step
    again. It is told once, however many coordinators follow."""
    config = watching(config, action)
    write(config, config.started, BEGUN, steps=13, high=SPIKE)

    async def go_on() -> Stop | None:
        coordinator = Coordinator(config)
        await coordinator.known()
        membership, retreat = coordinator._membership, coordinator._retreat
        acts = {"warn": lambda: True, "stop": lambda: membership.stopped is not None}
        due = acts.get(action, lambda: membership.progress.going_back)
        while not due() or retreat._going:
            await asyncio.sleep(0.001)
        return await coordinator.verdict()

    stops = [asyncio.run(asyncio.wait_for(go_on(), 10.0)) for _ in range(2)]
    happened = read_events(config.paths.events)
    told = [
        (e.trouble, e.first, e.last, e.action)
        for e in happened
        if isinstance(e, events.TrainingTrouble)
    ]
    assert told == [("loss_spike", 10, 11, action)]
    back = [(e.step, e.skip) for e in happened if isinstance(e, events.WentBack)]
    skip_steps = config.health.training.skip_steps
    assert back == ([(0, [10, skip_steps])] if action == "skip_data" else [])
    assert all(
        (stop is not None and "step 11: the loss" in str(stop.error)) == (action == "stop")
        for stop in stops
    )


def test_what_steps_of_an_earlier_start_show_is_not_told(config: CoordinatorConfig) -> None:
    """They were held against the settings of that one."""
    config = watching(config, "stop")
    config = replace(config, started=replace(config.started, start_step=13), restore_step=13)
    write(config, config.started, replace(BEGUN, step=13, generation=2), steps=13, high=SPIKE)

    async def go_on() -> None:
        coordinator = Coordinator(config)
        await coordinator.known()
        await coordinator.end("interrupted", None)

    asyncio.run(asyncio.wait_for(go_on(), 10.0))
    assert "training_trouble" not in kinds(read_events(config.paths.events))


def test_what_has_happened_is_read_and_not_held(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run of months it is a million events."""
    held = list[weakref.ref[events.Event]]()

    def noted(path: Path, since: float) -> list[events.Event]:
        found = events_to_go_on_from(path, since)
        held.extend(weakref.ref(one) for one in found if isinstance(one, events.Evaluated))
        return found

    monkeypatch.setattr(actor, "events_to_go_on_from", noted)
    told = events.Evaluated(time=3.0, step=4, val_loss=1.0, tokens=8)
    write(config, config.started, BEGUN, told, steps=4)
    coordinator = Coordinator(config)
    gc.collect()
    assert [one() for one in held] == [None]
    asyncio.run(coordinator.end("finished", None))


BACK = events.WentBack(time=3.0, step=2, before=4, reason="")


def test_a_store_that_is_away_does_not_end_it(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def give_up_after(self: Retreat, step: int, *, only_own: bool = False) -> None:
        asked.append(step)
        if len(asked) < 3:
            raise StoreUnavailableError("s3://b", None, "no answer")

    monkeypatch.setattr(Retreat, "give_up_after", give_up_after)
    monkeypatch.setattr(actor, "_STORAGE_RETRY_S", 0.0)
    write(config, config.started, BEGUN, BACK)
    assert asyncio.run(Coordinator(config).verdict()) is None
    assert asked == [2, 2, 2]


def test_checkpoints_that_cannot_be_set_aside_end_the_run(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up_after(self: Retreat, step: int, *, only_own: bool = False) -> None:
        raise CheckpointError("it is locked")

    monkeypatch.setattr(Retreat, "give_up_after", give_up_after)
    write(config, config.started, BEGUN, BACK)
    stop = asyncio.run(Coordinator(config).verdict())
    assert stop is not None and stop.error is not None
    assert stop.error.endswith("cannot be set aside: it is locked")


def test_one_that_finds_no_checkpoint_lets_nobody_begin_from_the_seed(
    config: CoordinatorConfig,
) -> None:
    """There was one, and its store is not mounted where Ray has started the coordinator anew."""
    saved = events.CheckpointCommitted(time=3.0, step=4, generation=1, bytes=1, seconds=1.0)
    write(config, config.started, saved)
    coordinator = Coordinator(config)
    coordinator._dispatcher.ready.set()

    async def all_copies_are_lost() -> Stop | None:
        membership = coordinator._membership
        membership.formations.expect(1)
        identity = Identity(worker="a", rank=0, node="A", pid=1)
        membership.join(Report(identity=identity))
        (build,) = membership.advance().answers.values()
        assert isinstance(build, Build)
        membership.join(Report(identity=identity, built=build.formed))
        membership.advance()
        return await coordinator.verdict()

    stop = asyncio.run(all_copies_are_lost())
    assert stop is not None and stop.error is not None
    assert "had the state of step 4 saved" in stop.error
    assert (
        f"found no checkpoint of its own that can be read in {config.paths.checkpoints}"
        in stop.error
    )


@pytest.mark.parametrize("run", [{"name": "other", "id": "another"}, None])
def test_one_goes_by_the_runs_own_checkpoint_that_it_has_come_to(
    config: CoordinatorConfig, run: dict[str, str] | None
) -> None:
    """Not by a later one, of another run or imported: the run's own would be dropped as too old.
    Nor is a later one of its own in the way of that step."""

    def part(rank: int, step: int) -> Receipt:
        row = TensorSlice("param/w", (2, 4), "uint8", (rank, 0), (1, 4))
        attempt = Attempt(rank=rank, step=step, generation=1)
        return write_shared(store, Keys(), attempt, [row], memoryview(bytes(64)))

    def save(step: int, **state: Any) -> None:
        parts = [part(0, step), part(1, step)]
        how: dict[str, Any] = {"training_state": {**NUMBERS, **state}, "versions": {}}
        commit(store, Keys(), step=step, generation=1, receipts=parts, **how)

    async def go_on() -> None:
        coordinator = Coordinator(config)
        coordinator._dispatcher.ready.set()
        progress = coordinator._membership.progress
        assert progress.restore_step == 4
        progress.resume(generation=1, restored=1, recorded=8, began=0)
        for rank in (0, 1):
            await coordinator.receipt(part(rank, 8), {}, 0.0, 2)
        assert progress.restore_step == 8
        await coordinator.end("finished", None)

    store = open_store(config.paths.checkpoints)
    own = {"name": "r", "id": config.identity.id}
    save(4, run=own)
    save(8, run=own)  # too late: the run has gone by the one before since
    save(20, **({} if run is None else {"run": run}))
    write(config, config.started, BEGUN, steps=6)
    asyncio.run(go_on())
    assert list_steps(store, Keys()) == [4, 8, 20]
