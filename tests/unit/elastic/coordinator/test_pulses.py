"""What is told of a run, with the coordinator's real parts round it; only Ray is a stand-in."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.coordinator import pulses
from elastic.coordinator.aside import Aside
from elastic.coordinator.pulses import Pulses
from elastic.protocol.causes import CRASH
from elastic.protocol.events import StepRecord
from elastic.protocol.pulse import Pulse, read_pulse, write_pulse
from elastic.reporting import event_log
from elastic.reporting.event_log import EventLog
from tests.support.coordinator_desk import CoordinatorDesk

PATIENCE_S = 10.0
LAYOUT = {"replicas": 3, "shard": 1, "tensor": 1, "lanes": 3, "spares": 1}


class Gauges:
    """Keeps what is set."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        assert tags == {"ray_train_run_name": "r"}
        self.values: dict[tuple[str, str], float] = {}

    def set(self, name: str, value: float, tags: Mapping[str, str], what: str) -> None:
        assert what
        self.values[name, "|".join(tags.values())] = value


class Desk(CoordinatorDesk):
    """Workers a, b and c train, and a spare d waits."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, spares=("d",))
        started = replace(self.config.started, time=time.time(), layout=LAYOUT)
        config = replace(self.config, started=started)
        aside = Aside(self.membership, self.dispatcher)
        self.pulses = Pulses(config, self.membership, self.workers, self.records, aside)

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        async def tell() -> None:
            self.pulses.begin()
            self.pulses.begin()  # the supervisor asks again and again
            await asyncio.wait_for(story(), PATIENCE_S)
            self.membership.stop("enough")
            await self.dispatcher.tell()
            await self.until(lambda: self.gauge("elastic_over") == 1)

        asyncio.run(tell())

    async def until(self, so: Callable[[], bool]) -> None:
        async def look() -> None:
            while not so():
                await asyncio.sleep(0.005)

        await asyncio.wait_for(look(), PATIENCE_S)

    def gauge(self, name: str, tag: str = "") -> float | None:
        gauges: Gauges = self.pulses._gauges  # type: ignore[assignment]
        return gauges.values.get((name, tag))

    def pulse(self) -> Pulse | None:
        return read_pulse(self.paths.pulse)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulses, "PULSE_S", 0.01)
    monkeypatch.setattr(pulses, "Gauges", Gauges)


def test_a_run_tells_of_its_spares_and_of_what_is_used_up(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.until(lambda: desk.pulse() is not None)
        whole = desk.pulse()
        assert whole is not None
        assert (whole.spares, whole.planned_spares, whole.spareless_since) == (1, 1, None)
        before = time.time()
        await desk.workers.lose("d", CRASH, "killed")
        await desk.until(lambda: desk.gauge("elastic_spares") == 0)
        await desk.until(lambda: (desk.pulse() or whole).spares == 0)
        first = desk.pulse()
        assert first is not None and first.spareless_since is not None
        assert before <= first.spareless_since <= time.time()
        assert tuple(first.spent["max_crashes"]) == (1, 50)
        assert tuple(first.spent["max_regroups_without_progress"]) == (0, 8)
        await desk.until(lambda: (desk.pulse() or first).time > first.time)
        later = desk.pulse()
        assert later is not None and later.spareless_since == first.spareless_since

    desk.run(story)
    assert desk.gauge("elastic_workers_lost", "crash") == 1
    assert desk.gauge("elastic_budget_spent", "max_crashes") == pytest.approx(1 / 50)


def test_regroups_in_vain_are_told_until_a_step_is_committed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    most = desk.membership.config.max_regroups_without_progress
    progress = desk.membership.progress

    def spent() -> tuple[int, int] | None:
        pulse = desk.pulse()
        return None if pulse is None else pulse.spent["max_regroups_without_progress"]

    async def story() -> None:
        for _ in range(most - 1):
            progress.interrupted(0)
        await desk.until(lambda: spent() == (most - 1, most))
        progress.record(0)
        await desk.until(lambda: spent() == (0, most))

    desk.run(story)


def test_one_started_anew_reads_no_steps_of_earlier_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be millions, and where it has none of its own it looked at all of them."""
    desk, read, step_of = Desk(tmp_path), list[bytes](), event_log._step_of

    def noted(line: bytes) -> StepRecord | None:
        read.append(line)
        return step_of(line)

    def replay() -> float | None:
        read.clear()
        desk.pulses.replay([])
        return desk.pulses._meter.stepped

    def record(step: int, at: float, generation: int) -> StepRecord:
        return StepRecord(
            step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, time=at, generation=generation,
            replicas=3, sample_digests=[],
        )  # fmt: skip

    monkeypatch.setattr(event_log, "_step_of", noted)
    now = desk.config.started.time - 100.0  # by a worker's clock
    with EventLog(desk.paths.steps) as log:
        for step in range(50):
            log.append(record(step, float(step), generation=0))
        assert replay() is None and len(read) == 1
        log.append(record(50, now, generation=1))
        assert replay() == now and len(read) == 1


def test_a_directory_that_cannot_be_written_to_ends_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.paths.pulse.mkdir()  # so that it cannot be replaced by a file

    async def story() -> None:
        await desk.until(lambda: desk.gauge("elastic_workers") == 4)
        first = desk.gauge("elastic_heartbeat_timestamp_seconds")
        await desk.until(lambda: desk.gauge("elastic_heartbeat_timestamp_seconds") != first)
        assert desk.membership.stopped is None

    desk.run(story)


def test_a_storage_that_hangs_holds_up_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, begun, beats = threading.Event(), list[Pulse](), set[float | None]()

    def hang(path: Path, pulse: Pulse) -> None:
        begun.append(pulse)
        answers.wait(PATIENCE_S)
        write_pulse(path, pulse)

    def has_gone_on() -> bool:
        beats.add(desk.gauge("elastic_heartbeat_timestamp_seconds"))
        return len(beats) > 3

    monkeypatch.setattr(pulses, "write_pulse", hang)
    desk = Desk(tmp_path)

    async def story() -> None:
        await desk.until(lambda: bool(begun))
        await desk.until(has_gone_on)
        desk.membership.stop("enough")
        await desk.dispatcher.tell()
        await desk.until(lambda: desk.gauge("elastic_over") == 1)
        assert len(begun) == 1, "it takes one thread"
        answers.set()
        await desk.pulses.finish()
        assert len(begun) == 2 and desk.pulse() == begun[1], "the last one is written, too"

    desk.run(story)


@pytest.mark.parametrize("begun", [True, False])
def test_the_run_s_end_waits_for_the_last_pulse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(pulses, "PULSE_S", 60.0)  # a run that ends before its first one
    desk = Desk(tmp_path)

    async def story() -> None:
        if begun:
            desk.pulses.begin()
            await asyncio.sleep(0)
        desk.membership.stop("enough")
        await desk.dispatcher.tell()
        await desk.pulses.finish()
        assert desk.pulse() is not None
        assert desk.gauge("elastic_over") == 1

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_coordinator_that_ends_before_it_knows_the_run_drops_nothing_unseen(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Python would tell of a coroutine that was never awaited."""
    desk = Desk(tmp_path)
    desk.dispatcher.ready.clear()

    async def end() -> None:
        desk.pulses.begin()
        await asyncio.sleep(0)

    asyncio.run(end())
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]
