"""Reads of less than a block go by the table of a segment, and read little more than they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpointing import (
    Attempt,
    Box,
    CorruptError,
    Manifest,
    Reader,
    Receipt,
    TensorSlice,
    commit,
    verify_checkpoint,
    write_shared,
)
from checkpointing.format.layout import BLOCK_BYTES, PIECE_BYTES
from checkpointing.format.manifest import CrcTable
from checkpointing.stores.local import LocalStore
from tests.support.sealed import seal, unsealed
from tests.support.tiny_checkpoint import KEYS, STEP, commit_shares, write_state

SHAPES = {
    "param/embed": (8192, 640),
    "param/up": (4096, 1024),
    "param/down": (1500, 2048),
    "param/norm": (1024,),
    "exp_avg/up": (4096, 1024),
}
ROW = 4 * 1024


class Counting(LocalStore):
    """Notes every range read, and can change a byte of what comes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []
        self.spoil: int | None = None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads.append((key, start, start + length))
        data = super().get_range(key, start, length)
        if self.spoil is None:
            return data
        at, self.spoil = self.spoil, None
        return data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :]


def rows_of(name: str, rank: int, ranks: int) -> Box:
    """The rows of a rank, as FSDP2 cuts a tensor: ceil(rows / ranks) for each while they last."""
    rows, *rest = SHAPES[name]
    each = -(-rows // ranks)
    first = min(rank * each, rows)
    return Box(name, (first, *[0] * len(rest)), (min(each, rows - first), *rest))


def write(store: LocalStore, state: dict[str, torch.Tensor], ranks: int) -> Manifest:
    shares = []
    for rank in range(ranks):
        boxes = [rows_of(name, rank, ranks) for name in SHAPES]
        shares.append(
            [
                (
                    TensorSlice(box.name, SHAPES[box.name], "float32", box.offsets, box.sizes),
                    state[box.name].narrow(0, box.offsets[0], box.sizes[0]),
                )
                for box in boxes
            ]
        )
    return commit_shares(
        store,
        shares,
        segment_bytes=512 << 20,
        block_bytes=BLOCK_BYTES,
        piece_bytes=PIECE_BYTES,
    )


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def table_of(manifest: Manifest, key: str) -> CrcTable:
    table = manifest.segments[key].table
    assert table is not None
    return table


@pytest.mark.parametrize(("writers", "readers"), [(4, 3), (4, 6), (8, 5), (8, 7)])
def test_a_reshard_reads_little_more_than_it_needs(
    state: dict[str, torch.Tensor], tmp_path: Path, writers: int, readers: int
) -> None:
    store = Counting(tmp_path)
    made = write(store, state, writers)
    for rank in range(readers):
        boxes = [rows_of(name, rank, readers) for name in SHAPES]
        for box, got in zip(boxes, Reader(store, made).read_many(boxes), strict=True):
            assert torch.equal(got, state[box.name].narrow(0, box.offsets[0], box.sizes[0]))
    needed = sum(tensor.nbytes for tensor in state.values())
    assert needed > 60 << 20
    assert sum(stop - start for _, start, stop in store.reads) <= 1.05 * needed
    pairs = writers + readers  # of a segment and a reader of some of it: one table, a run a tensor
    assert len(store.reads) <= pairs * (1 + len(SHAPES))


def test_the_same_layout_reads_each_segment_once_and_no_table(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    store = Counting(tmp_path)
    made = write(store, state, 2)
    for rank in range(2):
        Reader(store, made).read_many([rows_of(name, rank, 2) for name in SHAPES])
    assert sorted(store.reads) == [
        (key, 0, table_of(made, key).begin) for key in sorted(made.segments)
    ]


@pytest.fixture
def one(tmp_path: Path) -> tuple[Counting, Manifest, torch.Tensor]:
    """A checkpoint of one tensor of 8 MiB, in one segment: two blocks and a bit."""
    store, tensor = Counting(tmp_path), torch.arange(2 << 20).reshape(2048, 1024)
    part = TensorSlice("t", (2048, 1024), "int32", (0, 0), (2048, 1024))
    made = commit_shares(
        store,
        [[(part, tensor.int())]],
        segment_bytes=512 << 20,
        block_bytes=BLOCK_BYTES,
        piece_bytes=PIECE_BYTES,
    )
    return store, made, tensor.int()


def test_a_table_is_read_once(one: tuple[Counting, Manifest, torch.Tensor]) -> None:
    store, made, tensor = one
    (key,) = made.segments
    reader = Reader(store, made)
    for row in (100, 1700):
        assert torch.equal(reader.read("t", (row, 0), (20, 1024)), tensor[row : row + 20])
    table = table_of(made, key)
    assert store.reads[0] == (key, table.begin, made.segments[key].size_bytes)
    assert len(store.reads) == 3
    for _, start, stop in store.reads[1:]:
        assert start % PIECE_BYTES == stop % PIECE_BYTES == 0
        assert stop - start <= 20 * ROW + 2 * PIECE_BYTES


def test_flips_on_the_way_are_read_again(one: tuple[Counting, Manifest, torch.Tensor]) -> None:
    store, made, tensor = one
    reader = Reader(store, made)
    store.spoil = 77  # in the table
    assert torch.equal(reader.read("t", (5, 0), (3, 1024)), tensor[5:8])
    assert [store.reads[0]] * 2 == store.reads[:2]
    assert len(store.reads) == 3
    store.spoil = 5000  # in a piece
    assert torch.equal(reader.read("t", (900, 0), (3, 1024)), tensor[900:903])
    assert len(store.reads) == 5


def flip(store: LocalStore, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 4
    (store.root / key).write_bytes(data)


def test_a_flip_in_a_piece_at_rest(one: tuple[Counting, Manifest, torch.Tensor]) -> None:
    store, made, tensor = one
    (key,) = made.segments
    (saved,) = made.parts_of("t")
    at = saved.begin + 1500 * ROW + 9
    flip(store, key, at)
    first = at // PIECE_BYTES * PIECE_BYTES
    with pytest.raises(CorruptError, match=f"{key}: block 1 .*: its CRC32 differed twice") as bad:
        Reader(store, made).read("t", (1490, 0), (20, 1024))
    assert bad.value.byte_range == (first, first + PIECE_BYTES)
    beside = Reader(store, made).read("t", (1600, 0), (20, 1024))
    assert torch.equal(beside, tensor[1600:1620])


def test_a_flip_in_a_table_at_rest(one: tuple[Counting, Manifest, torch.Tensor]) -> None:
    store, made, tensor = one
    (key,) = made.segments
    begin, end = table_of(made, key).begin, made.segments[key].size_bytes
    flip(store, key, begin + 30)
    with pytest.raises(
        CorruptError, match="the CRC32 of its table of CRC32s differed twice"
    ) as bad:
        Reader(store, made).read("t", (5, 0), (3, 1024))
    assert (bad.value.key, bad.value.byte_range) == (key, (begin, end))
    (finding,) = verify_checkpoint(store, KEYS, STEP).findings
    assert (finding.key, finding.check) == (key, "table")
    flip(store, key, begin + 30)
    assert torch.equal(Reader(store, made).read("t", (5, 0), (3, 1024)), tensor[5:8])


def test_without_a_table_whole_blocks_are_read(tmp_path: Path) -> None:
    """As for snapshots, whose holders check whole blocks."""
    store, tensor = Counting(tmp_path), torch.arange(2 << 20, dtype=torch.int32).reshape(2048, 1024)
    part = TensorSlice("t", (2048, 1024), "int32", (0, 0), (2048, 1024))
    receipt = write_shared(
        store,
        KEYS,
        Attempt(rank=0, step=STEP, generation=0),
        [part],
        tensor.numpy().data.cast("B"),
        piece_bytes=None,
    )
    made = commit(
        store,
        KEYS,
        step=STEP,
        generation=0,
        receipts=[Receipt.from_dict(json.loads(json.dumps(receipt.to_dict())))],
        training_state={},
        versions={},
    )
    assert torch.equal(Reader(store, made).read("t", (5, 0), (3, 1024)), tensor[5:8])
    ((key, segment),) = made.segments.items()
    assert segment.table is None
    assert store.reads == [(key, 0, BLOCK_BYTES)]
    assert verify_checkpoint(store, KEYS, STEP).findings == ()


def test_verify_compares_what_the_manifest_says_of_tables(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_state(store, {"t": torch.arange(1000)}, segment_bytes=1 << 20, block_bytes=512)
    body = unsealed(store.get(KEYS.commit(STEP)))
    segment = body["segments"][1]
    segment["table"]["crc32"] = 1
    store.put(KEYS.commit(STEP), [seal(body)])
    (finding,) = verify_checkpoint(store, KEYS, STEP).findings
    assert (finding.key, finding.check) == (segment["key"], "table")


def test_verify_finds_a_table_that_was_written_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own CRC32 and those of the blocks are right, so only a comparison of the two shows it."""
    from checkpointing.format import segment

    right = segment.pack_crcs
    monkeypatch.setattr(segment, "pack_crcs", lambda crcs: right([crcs[0] ^ 1, *crcs[1:]]))
    store = LocalStore(tmp_path)
    write_state(store, {"t": torch.arange(1000)}, segment_bytes=1 << 20, block_bytes=512)
    findings = verify_checkpoint(store, KEYS, STEP).findings
    assert [finding.check for finding in findings] == ["table", "table"]
    assert all("blocks [0]" in finding.fact for finding in findings)
