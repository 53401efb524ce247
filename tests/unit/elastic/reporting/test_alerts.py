"""What is wrong with a run, from its records and its pulse, at chosen times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.protocol import events
from elastic.protocol.causes import Cause
from elastic.protocol.pulse import Pulse
from elastic.reporting.alerts import (
    Alert,
    Kind,
    Limits,
    Told,
    Watched,
    decide_watch_status,
    find_alerts,
    plan_news,
    take_back,
)

LIMITS = Limits(stalled_s=600.0, dead_s=60.0, storm=5)
NOW = 10_000.0
STARTED = events.RunStarted(time=1_000.0, name="r", layout={}, steps=50, start_step=4, versions={})
PULSE = Pulse(
    time=NOW - 4,
    steps=12,
    planned_steps=50,
    stepped=NOW - 5,
    step_s=2.0,
    replicas=2,
    min_replicas=1,
    spares=1,
    planned_spares=1,
    spareless_since=None,
    spent={"max_crashes": (3, 50)},
)


def lost(time: float, slot: str | None = "replica 0") -> events.WorkerLost:
    return events.WorkerLost(
        time=time, worker="w", node="n", pid=1, slot=slot, cause=Cause("crash"), detail=""
    )


def ended(outcome: events.RunOutcome, cause: str | None = None) -> events.RunEnded:
    return events.RunEnded(
        time=NOW - 100,
        step=12,
        outcome=outcome,
        error="user code raised:\n  secret\nValueError: spoilt\n" if outcome == "failed" else None,
        cause=None if cause is None else Cause(cause),
    )


def watched(*happened: events.Event) -> Watched:
    found = Watched()
    for event in happened:
        found.take(event)
    return found


def kinds(pulse: Pulse | None, *happened: events.Event, now: float = NOW) -> list[Kind]:
    return [alert.kind for alert in find_alerts(watched(*happened), pulse, LIMITS, now)]


def test_a_run_that_goes_well_gives_no_alert() -> None:
    assert kinds(PULSE, STARTED) == []
    assert kinds(PULSE, STARTED, lost(NOW - 20)) == []


def test_a_run_with_no_pulse_is_dead_and_nothing_else() -> None:
    assert kinds(replace(PULSE, time=NOW - 60, stepped=1_100.0), STARTED) == ["stalled"]
    assert kinds(replace(PULSE, time=NOW - 61, stepped=1_100.0), STARTED) == ["dead"]
    assert kinds(None, STARTED, now=1_050.0) == []
    assert kinds(None, STARTED, now=1_070.0) == ["dead"]
    assert kinds(None) == [], "nothing was started"


def test_a_pulse_of_an_earlier_start_is_none() -> None:
    again = replace(STARTED, time=NOW - 10)
    assert kinds(replace(PULSE, time=1_500.0), STARTED, again) == []
    assert kinds(replace(PULSE, time=1_500.0), STARTED, again, now=NOW + 51) == ["dead"]


@pytest.mark.parametrize(
    ("stepped", "step_s", "alerts"),
    [
        (NOW - 600, 2.0, []),
        (NOW - 601, 2.0, ["stalled"]),
        (NOW - 601, 40.0, []),  # 20 steps are longer
        (NOW - 801, 40.0, ["stalled"]),
        (NOW - 601, None, ["stalled"]),
    ],
)
def test_a_run_is_stalled_by_its_own_pace(
    stepped: float, step_s: float | None, alerts: list[Kind]
) -> None:
    assert kinds(replace(PULSE, stepped=stepped, step_s=step_s), STARTED) == alerts


def test_the_first_step_has_three_times_as_long() -> None:
    young = replace(PULSE, stepped=None, step_s=None)
    assert kinds(replace(young, time=2_790.0), STARTED, now=2_800.0) == []
    assert kinds(replace(young, time=2_800.0), STARTED, now=2_801.0) == ["stalled"]


def test_restarts_that_come_together_are_one() -> None:
    apart = [lost(NOW - 500 + 100 * n) for n in range(5)]
    assert kinds(PULSE, STARTED, *apart) == ["restart_storm"]
    assert kinds(PULSE, STARTED, *apart[1:]) == []
    together = [lost(NOW - 100 + n / 10) for n in range(50)]
    assert kinds(PULSE, STARTED, *together) == []
    assert kinds(PULSE, STARTED, *(replace(one, slot=None) for one in apart)) == [], "spares"


def test_starts_of_the_run_and_of_its_coordinator_count_too() -> None:
    anew = events.CoordinatorStarted(time=NOW - 300, pid=1, anew=True)
    again = [replace(STARTED, time=NOW - 250 + 50 * n) for n in range(3)]
    story = [STARTED, lost(NOW - 350), anew, *again]
    assert kinds(PULSE, *story) == ["restart_storm"]
    assert kinds(PULSE, *story[1:]) == [], "the first start is none"


def test_spares_may_be_missing_for_as_long_as_ray_takes_to_start_one() -> None:
    for since, alerts in ((NOW - 120, []), (NOW - 121, ["spares_exhausted"])):
        assert kinds(replace(PULSE, spares=0, spareless_since=since), STARTED) == alerts


def test_a_budget_is_low_from_80_percent_on() -> None:
    assert kinds(replace(PULSE, spent={"max_hangs": (7, 10)}), STARTED) == []
    low = replace(PULSE, spent={"max_crashes": (3, 50), "max_hangs": (8, 10)})
    (alert,) = find_alerts(watched(STARTED), low, LIMITS, NOW)
    assert alert.kind == "budget_low"
    assert "health.max_hangs: 8 of 10" in alert.detail and "max_crashes" not in alert.detail


def test_one_checkpoint_may_fail_and_two_in_a_row_are_told_of_until_one_is_written() -> None:
    def skipped(step: int) -> events.CheckpointSkipped:
        return events.CheckpointSkipped(time=NOW, step=step, reason="PutObject: 403\nsecret")

    saved = events.CheckpointCommitted(time=NOW, step=8, generation=1, bytes=1, seconds=0.1)
    assert kinds(PULSE, STARTED, skipped(4), saved, skipped(10), skipped(10)) == []
    story = (STARTED, saved, skipped(10), skipped(12), skipped(14))
    (alert,) = find_alerts(watched(*story), PULSE, LIMITS, NOW)
    assert alert.kind == "unsaved"
    assert alert.detail.startswith("3 checkpoints in a row were not written")
    assert "the newest is of 8 steps; of that of 14 steps: PutObject: 403. Look" in alert.detail
    (alert,) = find_alerts(watched(STARTED, *story[2:]), PULSE, LIMITS, NOW)
    assert "and there is none" in alert.detail
    assert kinds(PULSE, *story, replace(saved, step=16)) == []
    assert "unsaved" not in kinds(PULSE, *story, STARTED), "no save of this start has failed"


@pytest.mark.parametrize(
    ("outcome", "cause", "alerts", "status"),
    [
        ("finished", None, [], 0),
        ("stopped", None, [], 0),
        ("interrupted", None, [], 0),
        ("failed", None, ["failed"], 1),
        ("failed", "out_of_memory", ["failed"], 1),
        ("failed", "user_error", ["failed"], 93),
    ],
)
def test_a_run_that_has_ended_is_not_dead_and_its_end_is_the_status(
    outcome: events.RunOutcome, cause: str | None, alerts: list[Kind], status: int
) -> None:
    view = watched(STARTED, ended(outcome, cause))
    found = find_alerts(view, replace(PULSE, time=1_500.0), LIMITS, NOW)
    assert [alert.kind for alert in found] == alerts
    assert decide_watch_status(view, found) == status
    said = "user code raised: … ValueError: spoilt ("
    assert all(said in alert.detail and "secret" not in alert.detail for alert in found)
    assert all(("resume='never'" in alert.detail) == (status == 1) for alert in found)


def test_a_new_start_takes_the_end_back() -> None:
    story = (STARTED, ended("failed", "user_error"), replace(STARTED, time=NOW - 10))
    assert kinds(None, *story) == []
    assert decide_watch_status(watched(*story), []) == 0


def test_an_alert_is_told_when_it_comes_when_it_goes_and_each_hour() -> None:
    stalled, dead = Alert(kind="stalled", detail="s"), Alert(kind="dead", detail="d")
    told: Told = {}
    heard = []
    for now, standing in [
        (0.0, [stalled]),
        (30.0, [stalled]),
        (3_600.0, [stalled, dead]),
        (3_630.0, [replace(dead, detail="longer")]),
        (3_660.0, []),
        (3_690.0, [stalled]),
    ]:
        news, told = plan_news(told, standing, now)
        heard.append([(one.state, one.alert.kind) for one in news])
    assert heard == [
        [("firing", "stalled")],
        [],
        [("firing", "stalled"), ("firing", "dead")],
        [("resolved", "stalled")],
        [("resolved", "dead")],
        [("firing", "stalled")],
    ]


def test_what_nobody_took_is_news_again() -> None:
    dead = Alert(kind="dead", detail="d")
    told: Told = {"stalled": (0.0, Alert(kind="stalled", detail="s"))}
    for now, standing, state in [
        (30.0, [dead], "firing"),
        (60.0, [dead], "firing"),
        (3_660.0, [dead], "firing"),  # as it has stood for an hour
        (3_690.0, [dead], "firing"),
        (3_720.0, [], "resolved"),
        (3_750.0, [], "resolved"),
    ]:
        news, after = plan_news(told, standing, now)
        (one,) = [one for one in news if one.alert.kind == "dead"]
        assert one.state == state
        taken = now in (60.0, 3_690.0, 3_750.0)
        told = after if taken else take_back(told, after, "dead")
    assert told == {}, "of others nothing was lost"
