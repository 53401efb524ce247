"""The pace of a node: what is decided, and that its processes share it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.stores.s3 import pace
from checkpointing.stores.s3.pace import (
    MAX_PER_S,
    MIN_PER_S,
    Pace,
    Pacer,
    decide_faster,
    decide_slower,
    decide_turn,
    plan_pause,
)


def test_turns_are_spaced_by_the_rate() -> None:
    now = Pace(per_s=100.0)
    waits = []
    for _ in range(5):
        now, wait_s = decide_turn(now, 50.0)
        waits.append(wait_s)
    assert waits == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert decide_turn(now, 60.0)[1] == 0  # idle time is not saved up, but owes nothing either


def test_a_burst_of_slow_downs_counts_once_a_second() -> None:
    slower = Pace(per_s=1000.0)
    for at_s in (10.0, 10.1, 10.9):
        slower = decide_slower(slower, at_s)
    assert slower.per_s == pytest.approx(700)
    assert decide_slower(slower, 11.0).per_s == pytest.approx(490)


def test_it_comes_back_by_the_second_not_by_the_request() -> None:
    rare = often = Pace(per_s=100.0, raised_s=0.0)
    for tenth in range(1, 101):
        often = decide_faster(often, tenth / 10)
        if tenth % 10 == 0:
            rare = decide_faster(rare, tenth / 10)
    assert often.per_s == pytest.approx(300)
    assert rare.per_s == pytest.approx(300)
    assert decide_faster(often, 1000.0).per_s == pytest.approx(320)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3)), max_size=200))
def test_the_rate_stays_between_its_bounds(history: list[tuple[bool, float]]) -> None:
    at_s, now = 100.0, Pace()
    for good, passed_s in history:
        at_s += passed_s
        now = decide_faster(now, at_s) if good else decide_slower(now, at_s)
        assert MIN_PER_S <= now.per_s <= MAX_PER_S


def test_pauses_double_up_to_a_bound_and_use_all_of_it() -> None:
    assert [plan_pause(n, 1.0) for n in (1, 2, 3, 4)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert plan_pause(1000, 1.0) == 8.0
    assert plan_pause(5, 0.0) == 0.0


def test_processes_of_a_node_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SHARED", tmp_path)
    here, other = (Pacer(pace.shared_file(what)) for what in ("server bucket", "server other"))
    code = (
        "import sys, pathlib; from checkpointing.stores.s3 import pace;"
        "pace.SHARED = pathlib.Path(sys.argv[1]);"
        "pace.shared_pacer(pace.shared_file('server bucket')).slower()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert here.pace.per_s == pytest.approx(350)
    assert other.pace.per_s == 500
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_without_a_place_to_share_a_process_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"elastictrainer-pace-{os.getuid()}").write_text("somebody's file")
    monkeypatch.setattr(pace, "SHARED", tmp_path)
    alone = Pacer(pace.shared_file("server bucket"))
    assert "its own pace" in caplog.text
    alone.slower()
    assert alone.pace.per_s == pytest.approx(350)
    assert alone.wait() == 0
