"""What two machines say of a checkpoint tells whether it, the store or one of them is at fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpointing import (
    CheckpointError,
    CorruptError,
    Reader,
    TensorSlice,
    decide_fault,
    load_manifest,
    look_again,
)
from checkpointing.format import segment
from checkpointing.format.layout import BLOCK_BYTES, PIECE_BYTES
from checkpointing.stores.local import LocalStore
from tests.support.tiny_checkpoint import KEYS, STEP, commit_shares, write_state


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def told_by_reader(store: LocalStore, rows: int) -> CheckpointError:
    with pytest.raises(CheckpointError) as told:
        Reader(store, load_manifest(store, KEYS, STEP)).read("t", (0,), (rows,))
    return told.value


def test_a_table_that_was_written_wrong_is_not_the_readers_fault(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit flipped in the writer's memory before the table's own CRC32 was taken."""
    right = segment.pack_crcs
    share = [(TensorSlice("t", (1 << 20,), "int64", (0,), (1 << 20,)), torch.arange(1 << 20))]
    with monkeypatch.context() as patch:
        patch.setattr(segment, "pack_crcs", lambda crcs: right([crcs[0] ^ 1, *crcs[1:]]))
        commit_shares(
            store,
            [share],
            segment_bytes=1 << 30,
            block_bytes=BLOCK_BYTES,
            piece_bytes=PIECE_BYTES,
        )
    told = told_by_reader(store, 1000)
    assert isinstance(told, CorruptError) and told.byte_range == (0, PIECE_BYTES)
    with pytest.raises(CorruptError, match=r"its table .* blocks \[0\] .* hold \(1 of 3\)") as seen:
        look_again(store, KEYS, STEP, told)
    assert seen.value.key == told.key
    assert decide_fault(told, seen.value) == "checkpoint"


def test_a_table_that_is_right_clears_the_checkpoint(store: LocalStore) -> None:
    write_state(store, {"t": torch.arange(1000)}, segment_bytes=1 << 20, block_bytes=512)
    for key in load_manifest(store, KEYS, STEP).segments:
        told = CorruptError(key, "its CRC32 differed twice", 0, (0, 512))
        look_again(store, KEYS, STEP, told)
        assert decide_fault(told, None) == "reader"


def test_a_record_with_a_gap_is_not_the_readers_fault(store: LocalStore) -> None:
    write_state(store, {"t": torch.arange(1000)}, segment_bytes=1 << 20, block_bytes=512)
    made = load_manifest(store, KEYS, STEP)
    store.put(KEYS.commit(STEP), [replace(made, slices=made.slices[:-1]).to_bytes()])
    told = told_by_reader(store, 1000)
    look_again(store, KEYS, STEP, told)  # all bytes are as the record says
    assert decide_fault(told, None) == "checkpoint"
