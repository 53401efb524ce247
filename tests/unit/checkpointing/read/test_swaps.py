"""A segment in another one's place is found, whatever is in the two."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointing import CorruptError, Manifest, Reader, load_manifest, verify_checkpoint
from checkpointing.format.layout import BLOCK_BYTES, PIECE_BYTES
from checkpointing.stores.local import LocalStore
from tests.support.tiny_checkpoint import KEYS, write_state

STEPS = (7, 8)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Two rows each, one for each writer. Norms fit in a piece, weights fill a segment each."""
    rng = torch.Generator().manual_seed(seed)
    sizes = {"norm/0": 64, "weight/0": 6000, "norm/1": 64, "weight/1": 6000, "bias": 24}
    return {name: torch.randn(2, size, generator=rng) for name, size in sizes.items()}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Two steps with a segment for each tensor and writer."""
    store = LocalStore(tmp_path / "run")
    for step in STEPS:
        write_state(
            store,
            tensors(step),
            step=step,
            segment_bytes=4 * 6000,
            block_bytes=BLOCK_BYTES,
            piece_bytes=PIECE_BYTES,
        )
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
    slices = [part for parts in manifest.slices.values() for part in parts if part.segment == key]
    assert slices
    Reader(store, manifest).read_many([(p.name, p.offsets, p.sizes) for p in slices])


def test_a_reader_finds_every_swap_of_two_segments(store: LocalStore) -> None:
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
    assert pairs == 20 * 19 // 2
