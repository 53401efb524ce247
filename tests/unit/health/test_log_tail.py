"""New lines of a file, and its last ones; whatever becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from health import log_tail
from health.log_tail import LogTail, read_last


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_whole_lines_once_each(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "of before\nand half of")
    tail = LogTail(path)
    assert tail.read() == []
    add(path, " it\nnew\nha")
    assert tail.read() == [" it", "new"]
    assert tail.read() == []
    add(path, "lf\n")
    assert tail.read() == ["half"]


def test_a_flood_is_skipped_but_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "MOST_BYTES", 100)
    path = tmp_path / "log"
    tail = LogTail(path)
    add(path, "a line\n" * 1000 + "the last\n")
    lines = tail.read()
    assert lines[-1] == "the last" and sum(map(len, lines)) <= 100
    add(path, "x" * 1000)
    assert tail.read() == []
    add(path, "\nnext\n")
    assert tail.read()[-1] == "next"


def test_a_file_that_comes_goes_and_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read() == []
    add(path, "it came\n")
    assert tail.read() == ["it came"]
    path.unlink()
    assert tail.read() == []
    add(path, "anew\n")
    assert tail.read() == ["anew"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    path.write_bytes(b"\xff\xfe\x00 text\n")
    assert tail.read() == ["\ufffd\ufffd\x00 text"]


def test_the_last_words(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert read_last(path, 100) == ""
    path.write_text("one\ntwo\nthree\n")
    assert read_last(path, 100) == "one\ntwo\nthree\n"
    assert read_last(path, 8) == "three\n"
