"""What an import that does not come to its end leaves in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from checkpointing import (
    CorruptError,
    Keys,
    SliceError,
    StoreUnavailableError,
    TensorSlice,
    list_steps,
)
from checkpointing.stores.local import LocalStore
from trainer.exchange.intake import Incoming, commit_incoming

KEYS = Keys()


def row(number: int, read: Callable[[], torch.Tensor] = lambda: torch.ones(4)) -> Incoming:
    """One of three rows of a tensor, each a segment of its own."""
    return Incoming(part=TensorSlice("w", (3, 4), "float32", (number, 0), (1, 4)), read=read)


def bring(store: LocalStore, *incoming: Incoming) -> None:
    commit_incoming(store, KEYS, incoming, step=5, training_state={}, segment_bytes=16)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CorruptError("chunk", "its CRC differs")])
def test_an_import_that_breaks_off_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    store, written = LocalStore(tmp_path), list[int]()

    def fail() -> torch.Tensor:
        written.append(len(store.list("d/")))
        raise error

    with pytest.raises(type(error)):
        bring(store, row(0), row(1), row(2, fail))
    assert written == [2] and store.list("") == []
    bring(store, row(0), row(1), row(2))
    assert list_steps(store, KEYS) == [5]


def test_an_import_whose_parts_do_not_tile_leaves_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(SliceError):
        bring(store, row(0), row(1))
    assert store.list("") == []


def test_an_import_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    """Nor what was written of the part that is under way. What others wrote stays."""

    class Full(LocalStore):
        puts = 0

        def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
            size = super().put(key, chunks)
            self.puts += 1
            if self.puts == 2:
                raise StoreUnavailableError(key, 28, "No space left on device")
            return size

    other = KEYS.segment(rank=0, step=5, generation=0, attempt=0, index=0)
    LocalStore(tmp_path).put(other, [b"."])
    store = Full(tmp_path)
    with pytest.raises(StoreUnavailableError):
        bring(store, row(0), row(1), row(2))
    assert store.list("") == [other]


def test_where_the_record_may_be_there_the_segments_stay(tmp_path: Path) -> None:
    class Silent(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            done = super().put_if_absent(key, data)
            if key == KEYS.commit(5):
                raise StoreUnavailableError(key, None, "no answer")
            return done

    store = Silent(tmp_path)
    with pytest.raises(StoreUnavailableError):
        bring(store, row(0), row(1), row(2))
    assert list_steps(store, KEYS) == [5] and len(store.list("d/")) == 3
