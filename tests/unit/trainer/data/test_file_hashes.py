"""A file is read again where it may have changed, and only there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from trainer.data.file_hashes import hash_files
from trainer.errors import ConfigError
from trainer.progress import listening

LATER_S = time.time() + 3600
"""By then every file here has been what it is for long."""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("a", "b", "c")]
    for path in found:
        path.write_text(f"text of {path.name}")
    return found


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "hashes.json"


def read_by_hashing(files: list[Path], memory: Path, now_s: float = LATER_S) -> int:
    """How many files were read; the hashes are checked."""
    told: list[str] = []
    with listening(lambda what, done, total: told.append(what)):
        found = hash_files(files, memory, now_s)
    assert [(file.size_bytes, file.sha256) for file in found] == [
        (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files
    ]
    return int(told[0].split()[1]) if told else 0


def test_what_has_not_changed_is_not_read_again(files: list[Path], memory: Path) -> None:
    assert read_by_hashing(files[:2], memory) == 2
    assert read_by_hashing(files, memory) == 1
    assert read_by_hashing(files, memory) == 0


def test_another_content_is_read_also_with_the_size_and_time_of_the_old(
    files: list[Path], memory: Path
) -> None:
    read_by_hashing(files, memory)
    before = files[1].stat()
    other = files[1].with_name("other")
    other.write_text("TEXT of b")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, files[1])
    assert files[1].stat().st_size == before.st_size
    assert read_by_hashing(files, memory) == 1


def test_a_file_that_was_changed_just_now_is_read_once_more(
    files: list[Path], memory: Path
) -> None:
    """It may change again within one tick of the file system's clock."""
    just_now_s = max(path.stat().st_ctime for path in files) + 0.5
    assert read_by_hashing(files, memory, just_now_s) == 3
    assert read_by_hashing(files, memory, just_now_s) == 3
    assert not memory.exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"a": 1}', '{"a": [[1, 2, 3]]}'])
def test_a_damaged_memory_is_no_memory(files: list[Path], memory: Path, damage: str) -> None:
    read_by_hashing(files, memory)
    memory.write_text(damage)
    assert read_by_hashing(files, memory) == 3


def test_files_that_are_gone_are_forgotten(files: list[Path], memory: Path) -> None:
    """Those of a directory that is not mounted are not."""
    mounted = files[0].parent / "mount" / "d"
    mounted.parent.mkdir()
    mounted.write_text("text of d")
    read_by_hashing([*files, mounted], memory)
    files[0].unlink()
    mounted.parent.rename(files[0].parent / "away")
    files[1].write_text("another text")
    assert read_by_hashing(files[1:], memory) == 1
    assert set(json.loads(memory.read_text())) == {str(path) for path in (*files[1:], mounted)}


def test_what_was_read_before_an_error_is_remembered(files: list[Path], memory: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > len("text of a"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listening(interrupt):
        hash_files(files, memory, LATER_S)
    assert read_by_hashing(files, memory) == 2


def test_a_place_that_takes_no_memory_costs_only_time(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_by_hashing(files, tmp_path / "file" / "hashes.json") == 3


def test_a_file_that_is_not_there_is_named(files: list[Path], memory: Path) -> None:
    files[1].unlink()
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        hash_files(files, memory)
    assert caught.value.value == str(files[1])
