"""Token sets: what is written comes back, and damage is found."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.index import TokensCorruptError
from trainer.data.tokens import TokenSet, TokenWriter, most_maps


def write_set(
    directory: Path, parts: list[list[int]], *, vocab_size: int = 1000, file_tokens: int = 5
) -> TokenSet:
    with TokenWriter(
        directory, vocab_size=vocab_size, file_tokens=file_tokens, tokenizer="t", source="s"
    ) as writer:
        for part in parts:
            writer.write(np.array(part, dtype=np.uint32))
    return TokenSet.open(directory, verify=True)


@given(
    parts=st.lists(st.lists(st.integers(0, 999), max_size=12), max_size=6),
    file_tokens=st.integers(1, 9),
    data=st.data(),
)
def test_any_window_reads_back_over_file_boundaries(
    parts: list[list[int]], file_tokens: int, data: st.DataObject
) -> None:
    expected = [token for part in parts for token in part]
    with tempfile.TemporaryDirectory() as directory:
        tokens = write_set(Path(directory) / "set", parts, file_tokens=file_tokens)
        files = len(list(tokens.directory.glob("*.bin")))
        start = data.draw(st.integers(0, len(expected)))
        stop = data.draw(st.integers(start, len(expected)))
        assert tokens.read(start, stop - start).tolist() == expected[start:stop]
        streamed = [token for chunk in tokens.chunks(start, stop) for token in chunk.tolist()]
        assert streamed == expected[start:stop]
    assert len(tokens) == len(expected)
    assert files == -(-len(expected) // file_tokens)


@pytest.mark.parametrize(
    ("vocab_size", "name", "width"), [(2**16, "<u2", 2), (2**16 + 1, "<u4", 4)]
)
def test_the_narrowest_type_is_stored(
    tmp_path: Path, vocab_size: int, name: str, width: int
) -> None:
    top = vocab_size - 1
    tokens = write_set(tmp_path / "set", [[1, top]], vocab_size=vocab_size)
    raw = (tmp_path / "set" / "00000.bin").read_bytes()
    assert raw == (1).to_bytes(width, "little") + top.to_bytes(width, "little")
    assert tokens.read(0, 2).dtype == np.dtype(name)


def test_a_set_may_have_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """In a process of its own: this one may have more open already."""
    write_set(tmp_path / "set", [list(range(200))], file_tokens=1)
    code = f"""
import resource
from trainer.data import TokenSet
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
tokens = TokenSet.open({str(tmp_path / "set")!r})
for _ in range(2):
    assert tokens.read(0, 200).tolist() == list(range(200))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("open_files", "most"),
    [(1024, 256), (10**6, 16384), (resource.RLIM_INFINITY, 16384), (2, 1)],
)
def test_maps_leave_room_for_other_files_and_other_maps(open_files: int, most: int) -> None:
    assert most_maps(open_files) == most


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 4), (3, 1), (2, -1)])
def test_a_window_outside_the_set_is_refused(tmp_path: Path, start: int, count: int) -> None:
    tokens = write_set(tmp_path / "set", [[1, 2, 3]])
    with pytest.raises(IndexError, match="of a set of 3"):
        tokens.read(start, count)


def test_an_id_outside_the_vocabulary_is_refused_and_no_set_appears(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary of 1000"):
        write_set(tmp_path / "set", [[1, 2], [1000]])
    with pytest.raises(TokensCorruptError, match=r"index\.json"):
        TokenSet.open(tmp_path / "set")


def test_a_flipped_bit_is_found_when_asked_for(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [list(range(12))])
    path = tmp_path / "set" / "00001.bin"
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    TokenSet.open(tmp_path / "set")
    with pytest.raises(TokensCorruptError, match="checksum") as caught:
        TokenSet.open(tmp_path / "set", verify=True)
    assert caught.value.file == str(path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_file_of_the_wrong_size_is_always_found(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [list(range(12))])
    path = tmp_path / "set" / "00002.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TokensCorruptError, match="4 bytes, it has 3") as caught:
        TokenSet.open(tmp_path / "set")
    assert caught.value.file == str(path)
    path.unlink()
    with pytest.raises(TokensCorruptError, match="missing"):
        TokenSet.open(tmp_path / "set")


@pytest.mark.parametrize("left", [8, 2, 0, None])
def test_a_file_that_becomes_shorter_after_the_set_was_opened_is_told_when_it_is_read(
    tmp_path: Path, left: int | None
) -> None:
    tokens = write_set(tmp_path / "set", [list(range(12))])
    path = tmp_path / "set" / "00001.bin"
    if left is None:
        path.unlink()
    else:
        os.truncate(path, left)
    assert tokens.read(0, 5).tolist() == list(range(5))
    with pytest.raises(TokensCorruptError, match="size check: the index says 10 bytes") as caught:
        tokens.read(3, 4)
    assert caught.value.file == str(path)


def test_an_id_that_is_none_is_told_when_it_is_read(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [list(range(12))])
    path = tmp_path / "set" / "00001.bin"
    raw = bytearray(path.read_bytes())
    raw[3] |= 128
    path.write_bytes(raw)
    tokens = TokenSet.open(tmp_path / "set")
    assert tokens.read(0, 6).tolist() == list(range(6))
    with pytest.raises(TokensCorruptError, match=r"all are below 1000, it has 32774") as caught:
        tokens.read(0, 12)
    assert caught.value.file == str(path)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 0},
        {"schema": 2},
        {"dtype": "object"},
        {"tokens": 11},
        {"files": None},
        {"extra": 1},
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write_set(tmp_path / "set", [list(range(12))])
    path = tmp_path / "set" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TokensCorruptError) as caught:
        TokenSet.open(tmp_path / "set")
    assert caught.value.file == str(path)


def test_an_index_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [[1]])
    for text in ("{", "[]"):
        (tmp_path / "set" / "index.json").write_text(text)
        with pytest.raises(TokensCorruptError):
            TokenSet.open(tmp_path / "set")
