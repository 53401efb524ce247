from __future__ import annotations

import errno
from pathlib import Path

import pytest

from checkpointing.whole_file import sync, write_whole


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "pulse.json"
    write_whole(path, "ein Wort: ü")
    write_whole(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "taken", "text")
    assert {one.name for one in tmp_path.iterdir()} == {"pulse.json", "taken"}


def test_what_cannot_be_synced_is_named(tmp_path: Path) -> None:
    sync(tmp_path)
    with pytest.raises(OSError) as raised:
        sync(Path("/proc"))
    assert (raised.value.errno, raised.value.filename) == (errno.EINVAL, "/proc")
