"""A record file is written in pieces, late, and by one writer after another; each record is taken
once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.protocol.events import RunEnded, StepRecord, event_from_json, step_from_json
from elastic.reporting.event_log import EventLog
from elastic.reporting.follower import Follower


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=2.0, grad_norm=1.0, lr=1e-3, tokens=100, time=float(step), generation=1,
        replicas=2, sample_digests=[step],
    )  # fmt: skip


def write(path: Path, *steps: int) -> None:
    with EventLog(path) as log:
        for step in steps:
            log.append(step_record(step))


def follow(path: Path) -> Follower[StepRecord]:
    return Follower(path, step_from_json)


def taken(follower: Follower[StepRecord]) -> list[int]:
    return [record.step for record in follower.take()]


def test_a_record_is_taken_once_its_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(tmp_path / "whole", 0, 1)
    data = (tmp_path / "whole").read_bytes()
    follower = follow(path)
    seen = []
    with path.open("ab", buffering=0) as file:
        for place in range(len(data)):
            file.write(data[place : place + 1])
            seen.append(follower.take())
    first, second = data.index(b"\n"), len(data) - 1
    assert {place: records for place, records in enumerate(seen) if records} == {
        first: [step_record(0)],
        second: [step_record(1)],
    }


def test_a_file_may_come_late(tmp_path: Path) -> None:
    path = tmp_path / "run" / "steps.jsonl"
    follower = follow(path)
    assert taken(follower) == []
    write(path, 0)
    assert taken(follower) == [0]
    assert taken(follower) == []


def test_what_is_there_already_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 0, 1)
    follower = follow(path)
    write(path, 2)
    assert taken(follower) == [2]


@pytest.mark.parametrize("before", [False, True], ids=["followed", "of an earlier start"])
def test_the_next_writer_cuts_a_torn_line_off(tmp_path: Path, before: bool) -> None:
    path = tmp_path / "steps.jsonl"
    follower = follow(path)
    write(path, 0, 1)
    path.write_bytes(path.read_bytes()[:-10])  # the writer was killed in step 1's line
    if before:
        follower = follow(path)
    else:
        assert taken(follower) == [0]
    write(path, 1, 2)
    assert taken(follower) == [1, 2]


@pytest.mark.parametrize("damaged", ["{oh", "[]", '{"step": 1}'])
def test_a_damaged_line_is_logged_and_the_rest_taken(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"
    follower = follow(path)
    lines = [json.dumps(step_record(0).to_json()), damaged, json.dumps(step_record(2).to_json())]
    path.write_text("\n".join(lines) + "\n")
    assert taken(follower) == [0, 2]
    (logged,) = caplog.messages
    assert logged.startswith(f"a line of {path} is passed over: ")


def test_events_are_followed_as_well(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = Follower(path, event_from_json)
    event = RunEnded(time=1.0, step=0, outcome="finished", error=None)
    with EventLog(path) as log:
        log.append(event)
        assert follower.take() == [event]  # while the writer has the file open


@pytest.mark.parametrize("later", [(5, 6, 7), (5,)], ids=["longer", "shorter"])
def test_another_file_in_its_place_is_read_from_its_start(
    tmp_path: Path, later: tuple[int, ...]
) -> None:
    path = tmp_path / "run" / "steps.jsonl"
    write(path, 0, 1)
    follower = Follower(path, step_from_json, from_start=True)
    assert taken(follower) == [0, 1] and not follower.anew
    path.parent.rename(tmp_path / "run.before")
    assert taken(follower) == [] and not follower.anew
    write(path, *later)
    assert taken(follower) == [*later] and follower.anew
    assert taken(follower) == [] and not follower.anew
