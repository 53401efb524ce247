"""A segment in another one's place is found, whatever is in the two."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpointing import (
    CorruptError,
    Manifest,
    Reader,
    TensorSlice,
    commit,
    load_manifest,
    verify_checkpoint,
    write_slices,
)
from checkpointing.format.layout import BLOCK_BYTES, PIECE_BYTES
from checkpointing.format.slices import SliceTable
from checkpointing.stores.local import LocalStore
from tests.support.tiny_checkpoint import KEYS, write_state

STEPS = (7, 8)
OLD = Path(__file__).parents[3] / "data" / "checkpoints-unkeyed"
CONSTANT = 0x2144DF1C
"""The CRC32 of any bytes with their own CRC32 behind them."""


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Two rows each, one for each writer. Norms fit in a piece, weights fill a segment each."""
    rng = torch.Generator().manual_seed(seed)
    sizes = {"norm/0": 64, "weight/0": 6000, "norm/1": 64, "weight/1": 6000, "bias": 24}
    return {name: torch.randn(2, size, generator=rng) for name, size in sizes.items()}


def write(store: LocalStore, state: dict[str, torch.Tensor], step: int) -> None:
    write_state(
        store,
        state,
        step=step,
        segment_bytes=4 * 6000,
        block_bytes=BLOCK_BYTES,
        piece_bytes=PIECE_BYTES,
    )


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Two steps with a segment for each tensor and writer."""
    store = LocalStore(tmp_path / "run")
    for step in STEPS:
        write(store, tensors(step), step)
    return store


def swapped(store: LocalStore) -> Iterator[tuple[str, str]]:
    """Swaps two segments, one pair after the other, until all pairs had their turn."""
    keys = store.list("d/")
    data = {key: store.get(key) for key in keys}
    for one, other in itertools.combinations(keys, 2):
        (store.root / one).write_bytes(data[other])
        (store.root / other).write_bytes(data[one])
        yield one, other
        (store.root / one).write_bytes(data[one])
        (store.root / other).write_bytes(data[other])


def read_one(store: LocalStore, manifest: Manifest, key: str) -> None:
    """All that a segment holds, and nothing else."""
    slices = [part for part in manifest.slices if part.segment == key]
    assert slices
    Reader(store, manifest).read_many([(p.name, p.offsets, p.sizes) for p in slices])


def assert_swaps_are_found(store: LocalStore) -> int:
    """Returns how many there were."""
    manifests = {step: load_manifest(store, KEYS, step) for step in STEPS}
    pairs = 0
    for pair in swapped(store):
        for key in pair:
            step = KEYS.step_of(key)
            assert step is not None
            with pytest.raises(CorruptError) as caught:
                read_one(store, manifests[step], key)
            assert caught.value.key == key
            found = verify_checkpoint(store, KEYS, step, threads=1).findings
            assert {finding.key for finding in found} == set(pair) & manifests[step].segments.keys()
        pairs += 1
    return pairs


def test_a_reader_finds_every_swap_of_two_segments(store: LocalStore) -> None:
    assert assert_swaps_are_found(store) == 20 * 19 // 2


def test_verify_finds_swaps_of_equal_tensors_too(store: LocalStore) -> None:
    """As of a frozen tensor that was written twice: only the tables differ, each by its key."""
    write(store, tensors(7), 9)
    one, other = (
        KEYS.segment(rank=0, step=step, generation=0, attempt=0, index=1) for step in (7, 9)
    )
    data = store.get(one), store.get(other)
    table = load_manifest(store, KEYS, 9).segments[other].table
    assert table is not None and data[0] != data[1]
    assert data[0][: table.begin] == data[1][: table.begin]
    store.put(other, [data[0]])
    (finding,) = verify_checkpoint(store, KEYS, 9).findings
    assert (finding.key, finding.check) == (other, "table")


@pytest.fixture
def old(tmp_path: Path) -> LocalStore:
    """Steps 7 and 8 as the version before wrote them, with segments of a single piece."""
    shutil.copytree(OLD, tmp_path / "old")
    return LocalStore(tmp_path / "old")


def old_tensors(step: int) -> Mapping[str, torch.Tensor]:
    sizes = {"norm": 8, "weight": 300, "bias": 6}
    return {
        name: torch.arange(2 * size, dtype=torch.float32).reshape(2, size) + 1000 * step
        for name, size in sizes.items()
    }


def test_segments_of_the_version_before_are_read(old: LocalStore) -> None:
    for step in STEPS:
        manifest = load_manifest(old, KEYS, step)
        assert [s.keyed for s in manifest.segments.values()] == [False] * 6
        assert CONSTANT in {crc for s in manifest.segments.values() for crc in s.crcs}
        for name, tensor in old_tensors(step).items():
            assert torch.equal(Reader(old, manifest).read_full(name), tensor)
            assert torch.equal(Reader(old, manifest).read(name, (1, 2), (1, 3)), tensor[1:, 2:5])
        assert verify_checkpoint(old, KEYS, step).findings == ()


def test_swaps_of_segments_of_the_version_before_are_found(old: LocalStore) -> None:
    assert assert_swaps_are_found(old) == 12 * 11 // 2


def test_a_checkpoint_may_hold_segments_of_both_rules(old: LocalStore) -> None:
    """What stands still is not written again, so a new record names old segments."""
    before = load_manifest(old, KEYS, 8)
    kept = [part for part in before.slices if part.name != "bias"]
    changed = torch.arange(12, dtype=torch.float32).reshape(2, 6)
    receipt = write_slices(
        old,
        KEYS,
        rank=0,
        step=9,
        generation=0,
        attempt=0,
        slices=[(TensorSlice("bias", (2, 6), "float32", (0, 0), (2, 6)), changed)],
    )
    segments = {part.segment: before.segments[part.segment] for part in kept}
    whole = replace(
        receipt,
        slices=SliceTable.of(
            [*receipt.slices, *kept],
            dict(before.tensors),
            [*(s.key for s in receipt.segments), *segments],
        ),
        segments=(*receipt.segments, *segments.values()),
    )
    commit(old, KEYS, step=9, generation=0, receipts=[whole], training_state={}, versions={})
    made = load_manifest(old, KEYS, 9)
    assert {s.keyed for s in made.segments.values()} == {False, True}
    for name, tensor in {**old_tensors(8), "bias": changed}.items():
        assert torch.equal(Reader(old, made).read_full(name), tensor)
    assert verify_checkpoint(old, KEYS, 9).findings == ()
