"""A reader decodes straight into tensors that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointing import Box, IncompatibleError, Reader, SliceError, load_manifest, open_store
from tests.support.tiny_checkpoint import KEYS, STEP, write_state

WEIGHT = torch.arange(60.0).reshape(10, 6)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    store = open_store(tmp_path)
    write_state(store, {"w": WEIGHT})
    return Reader(store, load_manifest(store, KEYS, STEP))


def test_fills_what_it_is_given(reader: Reader) -> None:
    whole = torch.zeros(12, 6)
    (read,) = reader.read_many([Box("w", (3, 0), (5, 6))], into=[whole[2:7]])
    assert read.data_ptr() == whole[2:].data_ptr()
    assert torch.equal(whole[2:7], WEIGHT[3:8])
    assert not whole[:2].any() and not whole[7:].any()


def test_no_block_is_read_twice_where_one_read_ends_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 52 bytes in blocks of 512, and reads of four blocks: they meet within a row."""
    monkeypatch.setattr("checkpointing.read.reader._SPAN_BYTES", 1024)
    monkeypatch.setattr("checkpointing.read.reader._FETCH_BYTES", 2048)
    store, tensor = open_store(tmp_path), torch.randn(400, 13)
    manifest = write_state(store, {"w": tensor}, segment_bytes=1 << 20)
    read: list[int] = []

    class Counting:
        def get_range(self, key: str, start: int, length: int) -> bytes:
            read.append(length)
            return store.get_range(key, start, length)

    assert torch.equal(Reader(Counting(), manifest).read_full("w"), tensor)
    assert sum(read) <= sum(segment.size_bytes for segment in manifest.segments.values())
    assert len(read) > 9


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (torch.zeros(4, 6), SliceError, r"cannot be read into shape \(4, 6\)"),
        (torch.zeros(6, 5).t(), SliceError, r"strides \(1, 5\)"),
        (torch.zeros(5, 6, dtype=torch.float16), IncompatibleError, "float32 in the .* float16"),
    ],
)
def test_refuses_what_does_not_fit(
    reader: Reader, tensor: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        reader.read_many([Box("w", (3, 0), (5, 6))], into=[tensor])
