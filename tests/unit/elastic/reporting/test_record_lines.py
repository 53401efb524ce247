"""Few of a run's many records are found without parsing the others, from either end."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol import events
from elastic.protocol.causes import CRASH
from elastic.protocol.events import (
    Event,
    RegroupDone,
    RunEnded,
    RunStarted,
    SignsChanged,
    StepRecord,
    StepsTimed,
    WorkerLost,
    event_from_json,
)
from elastic.reporting import alerts, health_events, incidents, outputs, record_lines, verdicts
from elastic.reporting.event_log import (
    RecordError,
    events_to_go_on_from,
    last_events,
    read_events,
    read_steps,
    steps_before,
)
from elastic.reporting.follower import Follower
from tests.unit.elastic.reporting.test_event_log import histories, peak_bytes, record, write

BLOCKS = pytest.mark.parametrize("block", [1, 7, 64, 1 << 18])

UNREADABLE = '{"kind": "steps_timed", "seconds": ' + "[" * 200_000
"""No line of its kind that is parsed comes out: it ends whatever tries."""


def started(time: float) -> RunStarted:
    return RunStarted(time=time, name="r", layout={}, steps=9, start_step=0, versions={})


def lost(detail: str) -> WorkerLost:
    return WorkerLost(
        time=2.0, worker="w1", node="n", pid=1, slot=None, cause=CRASH, detail=detail
    )  # fmt: skip


ENDED = RunEnded(time=9.0, step=1, outcome="finished", error=None)


def write_lines(path: Path, *lines: Event | str) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line.to_json()) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@BLOCKS
def test_lines_of_other_kinds_are_not_parsed(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_lines, "_BLOCK_BYTES", block)
    other = UNREADABLE if block > 64 else '{"kind": "steps_timed", oh'
    speaks_of_others = lost('it read {"kind": "run_started", "time": 7}')
    path = write_lines(
        tmp_path / "e", other, started(1.0), other, speaks_of_others, other, ENDED, other
    )
    with path.open("a") as file:
        file.write(json.dumps(started(10.0).to_json()))  # torn: it lacks its newline
    kinds = RunStarted, RunEnded
    assert read_events(path, kinds=kinds) == [started(1.0), ENDED]
    assert last_events(path, *kinds) == [started(1.0), ENDED]
    assert last_events(path, RunEnded, WorkerLost, RegroupDone) == [ENDED, speaks_of_others]
    follower = Follower(path, event_from_json, from_start=True, kinds=kinds)
    assert follower.take() == [started(1.0), ENDED]
    with path.open("a") as file:
        file.write(f"\n{other}\n")
    assert follower.take() == [started(10.0)]
    assert follower.take() == []


def test_a_line_that_does_not_begin_as_the_writers_do_is_parsed(tmp_path: Path) -> None:
    """As of who has put the file through another program, or of a disk."""
    told = started(1.0).to_json()
    lines = [json.dumps(told, sort_keys=True), json.dumps(told, separators=(",", ":"))]
    path = write_lines(tmp_path / "e", *lines, "\0\0\0", ENDED)
    assert read_events(path, kinds=[RunStarted], lenient=True) == [started(1.0)] * 2
    assert last_events(path, RunStarted) == [started(1.0)]
    with pytest.raises(RecordError, match="e:3: not JSON"):
        read_events(path, kinds=[RunStarted])


def test_an_event_that_lacks_fields_is_none_of_its_kind(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "e", started(1.0), '{"kind": "run_started", "time": 2.0}')
    assert read_events(path, kinds=[RunStarted]) == [started(1.0)]
    assert last_events(path, RunStarted) == [started(1.0)]


@given(st.lists(st.sampled_from(["run_started", "run_ended", "worker_lost"])))
def test_the_last_of_each_kind_is_that_of_all(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str]
) -> None:
    of_kind = {"run_started": started(0.0), "run_ended": ENDED, "worker_lost": lost("")}
    happened = [replace(of_kind[kind], time=float(i)) for i, kind in enumerate(kinds)]
    path = write_lines(tmp_path_factory.getbasetemp() / "last", *happened)
    asked = WorkerLost, RunStarted
    found = [[one for one in happened if isinstance(one, kind)][-1:] for kind in asked]
    assert last_events(path, *asked) == [one for some in found for one in some]


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert last_events(tmp_path / "e", RunStarted) == []
    assert steps_before(tmp_path / "s", [1.0]) == []


@given(histories(), st.lists(st.integers(-1, 60).map(float)))
def test_steps_before_some_times_are_those_that_count(
    tmp_path_factory: pytest.TempPathFactory, records: list[StepRecord], times: list[float]
) -> None:
    in_time = [replace(one, time=float(i)) for i, one in enumerate(records)]
    path = write(tmp_path_factory.getbasetemp() / "steps", in_time)
    all_of_them = read_steps(path, digests=False)
    found = steps_before(path, times)
    for time in (inf, *times):
        by_then = bisect_right(all_of_them, time, key=lambda one: one.time)
        place = bisect_right(found, time, key=lambda one: one.time)
        assert found[place - 1 : place] == all_of_them[by_then - 1 : by_then]
    assert len(found) <= 1 + len(times)


def test_steps_before_a_time_are_parsed_alone_and_read_no_further(tmp_path: Path) -> None:
    whole = [json.dumps(record(step, float(step)).to_json()) for step in range(6)]
    lines = [line.replace("[1]", "[" * 200_000) for line in whole]
    lines[2], lines[5] = whole[2], whole[5]
    lines[0] = "[" * 200_000  # a glance does not tell what it is
    path = tmp_path / "s"
    path.write_text("\n".join(lines) + "\n")
    expected = [replace(record(step, float(step)), sample_digests=[]) for step in (2, 5)]
    assert steps_before(path, [2.5]) == expected
    path.write_text("\n".join([*whole[:3], "{oh", whole[5].replace("1.0", '"nan"', 1)]) + "\n")
    assert [one.step for one in steps_before(path, [2.5])] == [2, 5]


def test_a_step_whose_time_is_no_number_is_passed_over(tmp_path: Path) -> None:
    """It looks like one at a glance."""
    path = write(tmp_path / "s", [record(2, 2.0), replace(record(3, 3.0), time=1.25e20)])
    damaged = path.read_text().splitlines()[0].replace('"time": 2.0', '"time": 1.2.3')
    path.write_text(path.read_text() + f"{damaged}\n")
    assert [one.step for one in steps_before(path, [])] == [3]


def test_of_what_nodes_showed_long_ago_the_last_of_each_is_read_alone(tmp_path: Path) -> None:
    """A line that must not be parsed would not come out of the parser."""

    def shown(node: str, time: float) -> SignsChanged:
        return SignsChanged(time=time, node=node, names=[node], signs=[{"name": f"at {time}"}])

    kept = [started(0.5), shown("n1", 2.0), shown("n2", 3.0), shown("n1", 5.0), shown("n1", 6.0)]
    lines = [json.dumps(one.to_json()) for one in kept]
    unread = json.dumps(shown("n1", 1.0).to_json()).replace('["n1"]', "[" * 200_000)
    damaged = lines[1][:-1]
    path = tmp_path / "e"
    path.write_text("\n".join([lines[0], unread, *lines[1:], damaged, "damaged"]) + "\n")
    assert events_to_go_on_from(path, 5.0) == kept
    assert events_to_go_on_from(path, 9.0) == [kept[0], kept[2], kept[4]]
    assert events_to_go_on_from(tmp_path / "none", 5.0) == []


def test_an_event_whose_time_is_no_number_is_a_damaged_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "e", '{"kind": "unheard_of", "time": "abc"}', ENDED)
    assert read_events(path, lenient=True) == [ENDED] == last_events(path, RunEnded)
    with pytest.raises(RecordError, match=r"e:1: time is no number but 'abc'"):
        read_events(path)


def test_a_watch_does_not_hold_a_long_run(tmp_path: Path) -> None:
    path = tmp_path / "e"
    timed = StepsTimed(time=1.0, step=1, steps=20, seconds={"forward": 0.1, "backward": 0.2})
    write_lines(path, started(0.5), *[timed] * 50_000)
    follower = Follower(path, event_from_json, from_start=True, kinds=alerts.KINDS)
    assert peak_bytes(follower.take) < path.stat().st_size / 3


@pytest.mark.parametrize("module", [health_events, incidents, outputs, verdicts])
def test_all_kinds_that_a_module_knows_are_read_for_it(module: ModuleType) -> None:
    known = {one for one in vars(module).values() if isinstance(one, type)}
    kinds = {one for one in known if issubclass(one, Event) and one is not Event}
    assert kinds == {*module.KINDS}


@pytest.mark.parametrize("kind", Event.__subclasses__())
def test_a_watch_looks_at_its_kinds_alone(kind: type[Event]) -> None:
    watched = alerts.Watched()
    watched.take(started(1.0))
    watched.take(events.CheckpointSkipped(time=2.0, step=1, reason=""))
    before = dict(vars(watched)), dict(watched.unsaved), list(watched.restarts)
    values: dict[str, Any] = {one.name: "0" for one in fields(kind)} | {"time": inf}
    watched.take(kind(**values))
    after = dict(vars(watched)), dict(watched.unsaved), list(watched.restarts)
    assert (after != before) == (kind in alerts.KINDS)
