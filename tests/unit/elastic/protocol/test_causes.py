"""The table of causes, and one that is added from outside the package."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from matplotlib.colors import is_color_like

from elastic.config import HealthConfig
from elastic.protocol.causes import (
    CRASH,
    Budget,
    CauseEntry,
    entry_of,
    known_causes,
    register_cause,
)
from health.suspects import Mark, is_suspect
from tests.support import ROOT
from tests.support.plugins import install_plugin

OVERHEATED = CauseEntry(text="its GPU was too hot", budget="max_hangs", color="#ff7f0e")

PLUGIN = """
from elastic.protocol.causes import CauseEntry, register_cause
OVERHEATED = register_cause(
    "overheated",
    CauseEntry(text="its GPU was too hot", budget="max_hangs", color="#ff7f0e"),
)
"""

PROGRAM = """
from elastic.config import HealthConfig
from elastic.membership.failure import Loss, decide_failure
from elastic.protocol.causes import Cause, entry_of

loss = Loss(time=0.0, seat=0, cause=Cause("overheated"), step=3, committed=3, detail="98 C")
print(decide_failure([loss], HealthConfig(max_hangs=1)))
print(entry_of("overheated").color, entry_of("overheated").text)
"""


def test_every_entry_can_be_drawn_and_has_a_budget() -> None:
    budgets = {field.name for field in fields(HealthConfig)}
    assert set(get_args(Budget)) <= budgets
    entries = known_causes().values()
    assert all(is_color_like(entry.color) and entry.text for entry in entries)
    assert len({entry.color for entry in entries}) == len(entries)


def test_a_machine_that_is_suspect_at_once_is_so_for_hours() -> None:
    """What fades as soon as it is looked at again has nothing done."""
    weights = [entry.against_machine for entry in known_causes().values()]
    marks = [Mark(time=0.0, weight=one, cause="c", run="r", detail="d") for one in weights]
    at_once = [mark for mark in marks if is_suspect([mark], 0.0)]
    assert at_once and all(is_suspect([mark], 6 * 3600.0) for mark in at_once)


def test_a_cause_of_a_plugin_is_known_in_every_process(tmp_path: Path) -> None:
    plugin = {"elastictrainer.causes": {"overheating": "overheating"}}
    install_plugin(tmp_path, "overheating", PLUGIN, plugin)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ended, entry = done.stdout.strip().splitlines()
    assert "(health.max_hangs = 1); the last one: overheated, 98 C" in ended
    assert entry == "#ff7f0e its GPU was too hot"


def test_a_cause_that_is_not_known_here_is_taken_for_a_crash() -> None:
    assert entry_of("of another version") == entry_of(CRASH)


def test_a_wrong_entry_fails_at_once() -> None:
    with pytest.raises(ValueError, match="no budget 'max_heat'"):
        register_cause("hot", CauseEntry(text="hot", budget="max_heat", color="red"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="registered already"):
        register_cause("crash", OVERHEATED)
    assert "hot" not in known_causes()
