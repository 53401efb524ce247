from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import SuspectFileError
from elastic.reporting.suspect_file import SuspectFile
from health.suspects import Mark


def mark(time: float, run: str = "r") -> Mark:
    return Mark(time=time, weight=1.0, cause="link", run=run, detail="d")


def test_marks_are_kept_machine_by_machine(tmp_path: Path) -> None:
    file = SuspectFile(tmp_path)
    assert file.read() == {}
    assert file.add("m", mark(0.0)) == (mark(0.0),)
    assert file.add("n", mark(1.0)) == (mark(1.0),)
    assert SuspectFile(tmp_path).add("m", mark(60.0)) == (mark(0.0), mark(60.0))
    assert file.read() == {"m": (mark(0.0), mark(60.0)), "n": (mark(1.0),)}
    assert file.clear("x") == 0 and file.clear("m") == 1 and file.read().keys() == {"n"}
    assert file.clear(None) == 1 and file.read() == {} and not file.path.exists()


def test_a_mark_from_the_future_fades_from_when_it_was_written(tmp_path: Path) -> None:
    """Also where nobody writes any more."""
    file, then = SuspectFile(tmp_path), time.time() - 86_400.0
    file.add("m", mark(then + 1e9))
    os.utime(file.path, (then, then))
    assert file.read() == {"m": (mark(then),)}
    os.utime(file.path, (then + 2e9, then + 2e9))  # by a clock that is as wrong
    (one,) = file.read()["m"]
    assert one.time <= time.time()


def test_a_host_whose_clock_is_behind_leaves_the_marks_of_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For it they are ahead. It had them fade from its own time, for all."""
    file, now = SuspectFile(tmp_path), time.time()
    behind = now - 10 * 86_400.0
    file.add("m", mark(now))
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: behind)
        for number in range(2):
            file.add(f"n{number}", mark(behind))
            os.utime(file.path, (behind, behind))
        file.take_back("n0", lambda _: True)
        assert file.clear("n1") == 1
    file.add("o", mark(now))
    assert file.read() == {"m": (mark(now),), "o": (mark(now),)}


def test_no_run_loses_the_mark_of_another(tmp_path: Path) -> None:
    def add(run: int) -> None:
        for number in range(20):
            SuspectFile(tmp_path).add(f"m{run}-{number}", mark(1.0))

    threads = [threading.Thread(target=add, args=[run]) for run in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(SuspectFile(tmp_path).read()) == 80


@pytest.mark.parametrize("damaged", [b"", b'{"machines": {"n"', b"\0\0", b"\xff\xfe\xfd"])
def test_a_damaged_file_is_set_aside_by_the_next_mark(tmp_path: Path, damaged: bytes) -> None:
    file = SuspectFile(tmp_path)
    file.path.write_bytes(damaged)
    with pytest.raises(SuspectFileError):
        file.read()
    assert file.add("m", mark(0.0)) == (mark(0.0),)
    assert file.read() == {"m": (mark(0.0),)}
    assert (tmp_path / "suspect-nodes.damaged").read_bytes() == damaged


def test_a_record_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(act: Callable[..., None]) -> Callable[..., None]:
        def note(*of: Any) -> None:
            done.append(act.__name__)
            act(*of)

        return note

    monkeypatch.setattr(os, "fsync", noted(os.fsync))
    monkeypatch.setattr(os, "replace", noted(os.replace))
    SuspectFile(tmp_path).add("m", mark(0.0))
    assert done == ["fsync", "replace"]


@pytest.mark.parametrize("text", ["[]", '{"machines": {"m": [{}]}}'])
def test_what_is_no_record_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    file = SuspectFile(tmp_path)
    file.path.write_text(text)
    for act in (file.read, lambda: file.add("m", mark(0.0)), lambda: file.clear("m")):
        with pytest.raises(SuspectFileError, match=f"`elastic nodes clear {tmp_path}` removes it"):
            act()
    assert file.path.read_text() == text
    assert file.clear(None) == 0 and file.read() == {}
