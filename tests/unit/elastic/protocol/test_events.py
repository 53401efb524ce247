from __future__ import annotations

import errno
import json
import math
import pickle
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.causes import CRASH
from elastic.protocol.events import (
    Event,
    RegroupDone,
    RegroupGathered,
    RunEnded,
    RunStarted,
    StepRecord,
    StepSkipped,
    UnknownEvent,
    WorkerLost,
    event_from_json,
)
from elastic.reporting import event_log
from elastic.reporting.event_log import (
    EventLog,
    RecordError,
    last_event,
    last_events,
    last_step,
    read_events,
    read_steps,
)

LOST = WorkerLost(
    time=5.0, worker="w3", node="n1", pid=42, slot="replica 1 shard 0 tensor 0", cause=CRASH,
    detail="exit code -9",
)  # fmt: skip
DONE = RegroupDone(
    time=5.5, generation=2, step=7, replicas=1, lanes={"0": [0, 1]}, outcome="repeat",
    renumbered={}, lost_steps=0, repeated_steps=1,
)  # fmt: skip
GATHERED = RegroupGathered(time=5.25, generation=2)
ENDED = RunEnded(time=9.0, step=10, outcome="finished", error=None)


def step_record(step: int, time: float, loss: float = 1.0) -> StepRecord:
    return StepRecord(
        step=step, loss=loss, grad_norm=0.5, lr=1e-3, tokens=64, time=time, generation=1,
        replicas=2, sample_digests=[11, 2**63],
    )  # fmt: skip


def test_kind_is_the_class_name_in_snake_case() -> None:
    assert (WorkerLost.kind, RegroupDone.kind, RunEnded.kind) == (
        "worker_lost", "regroup_done", "run_ended",
    )  # fmt: skip


def test_an_event_is_a_flat_json_object_with_its_kind() -> None:
    assert ENDED.to_json() == {
        "kind": "run_ended", "time": 9.0, "step": 10, "outcome": "finished", "error": None,
        "cause": None,
    }  # fmt: skip


STARTED = RunStarted(
    time=1.0, name="run", layout={"replicas": 2}, steps=3, start_step=0, versions={},
    precision="bfloat16", flops_per_token={"6N": 6e9},
)  # fmt: skip


def test_a_start_that_an_older_version_wrote_is_read() -> None:
    older = STARTED.to_json()
    del older["precision"], older["flops_per_token"], older["store"], older["terms"]
    read = event_from_json(older)
    assert isinstance(read, RunStarted)
    assert (read.precision, read.flops_per_token, read.store) == ("", {}, None)
    assert read.terms == "tokens"


@pytest.mark.parametrize("store", ["", "s3://bucket/runs/run"])
def test_where_checkpoints_go_is_read_as_it_was_written(store: str) -> None:
    """Since 2026-11-26; empty: to the run directory."""
    read = event_from_json({**STARTED.to_json(), "store": store})
    assert isinstance(read, RunStarted) and read.store == store


@pytest.mark.parametrize("event", [STARTED, LOST, GATHERED, DONE, ENDED], ids=lambda e: e.kind)
def test_events_survive_json(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event.to_json()))) == event


@given(st.floats(), st.floats())
def test_non_finite_numbers_survive_as_standard_json(loss: float, norm: float) -> None:
    event = StepSkipped(time=1.0, step=3, loss=loss, grad_norm=norm)
    text = json.dumps(event.to_json(), allow_nan=False)
    read = event_from_json(json.loads(text))
    assert isinstance(read, StepSkipped)
    for got, wanted in ((read.loss, loss), (read.grad_norm, norm)):
        assert got == wanted or (math.isnan(got) and math.isnan(wanted))


def test_an_unknown_kind_is_kept_as_it_was() -> None:
    data = {"kind": "moon_landed", "time": 4.0, "crew": 3}
    read = event_from_json(data)
    assert read == UnknownEvent(time=4.0, data=data)
    assert read.to_json() == data


def test_fields_of_other_versions_are_ignored_and_missing_ones_make_it_unknown() -> None:
    data = ENDED.to_json()
    assert event_from_json({**data, "colour": "red"}) == ENDED
    del data["outcome"]
    assert isinstance(event_from_json(data), UnknownEvent)


def test_a_missing_field_has_its_default() -> None:
    started = RunStarted(time=0.0, name="r", layout={}, steps=1, start_step=0, versions={})
    data = started.to_json()
    del data["redone_steps"]
    assert event_from_json(data) == started


@pytest.mark.parametrize("value", [None, [], 10**400, "now"], ids=["null", "list", "huge", "text"])
@pytest.mark.parametrize("kind", ["run_ended", "moon_landed"])
def test_an_event_whose_time_is_no_number_is_damaged(kind: str, value: object) -> None:
    with pytest.raises(ValueError, match="time is no number"):
        event_from_json({**ENDED.to_json(), "kind": kind, "time": value})


def test_a_line_whose_number_is_none_is_passed_over_as_other_damaged_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events, steps = tmp_path / "events.jsonl", tmp_path / "steps.jsonl"
    for path, good, bad in (
        (events, LOST.to_json(), {**ENDED.to_json(), "time": None}),
        (steps, step_record(0, 1.0).to_json(), {**step_record(1, 2.0).to_json(), "loss": None}),
    ):
        path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    assert read_events(events, lenient=True) == [LOST]
    assert read_steps(steps, lenient=True) == [step_record(0, 1.0)]
    assert "events.jsonl:2: time is no number but None" in caplog.text
    assert "steps.jsonl:2: loss is no number but None" in caplog.text
    assert last_event(events) is None and last_events(events, RunEnded, WorkerLost) == [LOST]
    assert last_step(steps, lambda _: True, lenient=True) == step_record(0, 1.0)
    with pytest.raises(RecordError, match="time is no number but None"):
        read_events(events)


def test_a_log_is_readable_while_it_is_open_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path) as log:
        log.append(LOST)
        assert read_events(path) == [LOST]
    with EventLog(path) as log:
        log.append(DONE)
    assert read_events(path) == [LOST, DONE]
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_torn_last_line_is_ignored_and_then_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append(LOST)
        log.append(DONE)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_events(path) == [LOST]
    with EventLog(path) as log:
        log.append(ENDED)
    assert read_events(path) == [LOST, ENDED]


def test_a_damaged_whole_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(LOST.to_json()) + "\n{oh\n" + json.dumps(ENDED.to_json()) + "\n")
    with pytest.raises(RecordError, match=r"events\.jsonl:2: not JSON") as caught:
        read_events(path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_records_wait_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLIMIT_FSIZE stands for the disk: a record is cut in its middle, where room ends."""
    monkeypatch.setattr(event_log, "_FULL", (errno.EFBIG,))
    path, limits = tmp_path / "events.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(path) as log:
        log.append(LOST)
        room = path.stat().st_size + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # binds root too
        try:
            log.append(DONE)
            log.append(ENDED)
            assert path.stat().st_size == room and read_events(path) == [LOST]
            monkeypatch.setattr(event_log, "MOST_PENDING_BYTES", 100)
            with pytest.raises(OSError, match="File too large"):
                log.append(ENDED)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_events(path) == [LOST, DONE, ENDED, ENDED]


def test_there_are_no_records_before_there_is_a_file(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []
    assert read_steps(tmp_path / "steps.jsonl") == []


def write_steps(path: Path, *records: StepRecord) -> Path:
    with EventLog(path) as log:
        for record in records:
            log.append(record)
    return path


def test_steps_survive_the_file(tmp_path: Path) -> None:
    records = [step_record(0, 1.0), step_record(1, 2.0, loss=math.inf)]
    assert read_steps(write_steps(tmp_path / "s", *records)) == records


def test_the_last_record_of_a_repeated_step_counts(tmp_path: Path) -> None:
    first = [step_record(i, float(i), loss=1.0) for i in range(4)]
    again = [step_record(i, 10.0 + i, loss=2.0) for i in range(2, 5)]
    kept = read_steps(write_steps(tmp_path / "s", *first, *again))
    assert [(r.step, r.loss) for r in kept] == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_steps_lost_by_going_back_do_not_count_before_they_are_done_again(tmp_path: Path) -> None:
    again = replace(step_record(2, 10.0), generation=2)
    records = [*(step_record(i, float(i)) for i in range(5)), again]
    assert [r.step for r in read_steps(write_steps(tmp_path / "s", *records))] == [0, 1, 2]


def test_a_late_record_of_an_earlier_step_drops_nothing(tmp_path: Path) -> None:
    records = [step_record(0, 0.0), step_record(2, 2.0), step_record(1, 1.0)]
    assert [r.step for r in read_steps(write_steps(tmp_path / "s", *records))] == [0, 1, 2]


def test_a_step_record_without_its_fields_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(RecordError, match=r"steps\.jsonl:1"):
        read_steps(path)


def test_unicode_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event = RunStarted(time=0.0, name="Läufer", layout={}, steps=1, start_step=0, versions={})
    with EventLog(path) as log:
        log.append(event)
    assert "Läufer" in path.read_text(encoding="utf-8")
    assert read_events(path) == [event]
