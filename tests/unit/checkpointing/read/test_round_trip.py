"""Written in one layout, read in another: every bit, and every bit that is not right."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from checkpointing import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    Keys,
    Manifest,
    MissingError,
    Reader,
    SliceError,
    TensorSlice,
    load_manifest,
    newest,
    params_sha256,
    tensors_sha256,
    verify_checkpoint,
)
from checkpointing.format.dtypes import DTYPES
from checkpointing.format.segment import TABLE
from checkpointing.stores.local import LocalStore
from tests.support.tiny_checkpoint import commit_shares

KEYS = Keys()
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # fsync is free there
Grid = list[tuple[tuple[int, ...], tuple[int, ...]]]


def grid(cuts: Sequence[Sequence[int]], shape: Sequence[int]) -> Grid:
    """All boxes between the cuts of every dimension."""
    boxes: Grid = [((), ())]
    for points, extent in zip(cuts, shape, strict=True):
        edges = [0, *sorted(points), extent]
        ranges = [(a, b - a) for a, b in itertools.pairwise(edges)]
        boxes = [((*o, a), (*n, size)) for o, n in boxes for a, size in ranges]
    return boxes


def part_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for axis, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, at, size)
    return tensor


def random_bits(shape: Sequence[int], dtype: str, seed: int) -> torch.Tensor:
    """Any bits, NaNs with payload included; for bool only the two that are valid."""
    kind = getattr(torch, dtype)
    count = torch.empty(tuple(shape), dtype=kind).numel()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(
        0, high, (count * DTYPES[dtype].item_bytes,), generator=generator, dtype=torch.uint8
    )
    return raw.view(kind).reshape(tuple(shape))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    copies = [t.clone(memory_format=torch.contiguous_format).untyped_storage() for t in (a, b)]
    return bytes(copies[0]) == bytes(copies[1])


def save(
    store: LocalStore,
    shares: Sequence[Sequence[tuple[TensorSlice, torch.Tensor]]],
    *,
    segment_bytes: int = 1 << 20,
    block_bytes: int = 1 << 16,
    piece_bytes: int | None = None,
    step: int = 1,
) -> Manifest:
    return commit_shares(
        store,
        shares,
        step=step,
        segment_bytes=segment_bytes,
        block_bytes=block_bytes,
        piece_bytes=piece_bytes,
    )


def tensors_in(file: Path) -> dict[str, torch.Tensor]:
    """What a segment holds besides its table."""
    held: dict[str, torch.Tensor] = load_file(file)
    assert held.pop(TABLE).dtype == torch.uint32
    return held


def whole(name: str, tensor: torch.Tensor) -> tuple[TensorSlice, torch.Tensor]:
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSlice(name, shape, dtype, (0,) * len(shape), shape), tensor


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
shapes = st.lists(st.integers(0, 5), max_size=3)


def cuts_of(shape: Sequence[int]) -> st.SearchStrategy[list[list[int]]]:
    return st.tuples(*(st.lists(st.integers(0, n), max_size=2) for n in shape)).map(list)


tensors = shapes.flatmap(
    lambda shape: st.fixed_dictionaries(
        {
            "shape": st.just(shape),
            "dtype": st.sampled_from(sorted(DTYPES)),
            "saved": cuts_of(shape),
            "wanted": cuts_of(shape),
            "seed": st.integers(0, 1000),
            "transposed": st.booleans(),
        }
    )
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tree=st.dictionaries(
        names | st.sampled_from(["__metadata__", TABLE]), tensors, min_size=1, max_size=5
    ),
    ranks=st.integers(1, 4),
    segment_bytes=st.sampled_from([1, 40, 300, 1 << 20]),
    grain=st.sampled_from([(1, 1), (7, 7), (64, 64), (64, 4), (1 << 20, 8), (1 << 20, 1 << 16)]),
    request_bytes=st.sampled_from([1, 16, 1 << 18]),
    seed=st.integers(0, 1000),
)
def test_any_layout_to_any_other_is_bitwise_equal(
    tree: dict[str, dict[str, Any]],
    ranks: int,
    segment_bytes: int,
    grain: tuple[int, int],
    request_bytes: int,
    seed: int,
) -> None:
    rng = random.Random(seed)
    model: dict[str, torch.Tensor] = {}
    shares: list[list[tuple[TensorSlice, torch.Tensor]]] = [[] for _ in range(ranks)]
    for name, spec in tree.items():
        shape = tuple(spec["shape"])
        model[name] = random_bits(shape, spec["dtype"], spec["seed"])
        if spec["transposed"] and len(shape) > 1:  # the same values, not contiguous in memory
            model[name] = model[name].transpose(0, 1).contiguous().transpose(0, 1)
        for offsets, sizes in grid(spec["saved"], shape):
            part = TensorSlice(name, shape, spec["dtype"], offsets, sizes)
            rng.choice(shares).append((part, part_of(model[name], offsets, sizes)))
    with (
        tempfile.TemporaryDirectory(dir=IN_MEMORY) as root,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("checkpointing.read.reader._REQUEST_BYTES", request_bytes)
        store = LocalStore(root)
        save(store, shares, segment_bytes=segment_bytes, block_bytes=grain[0], piece_bytes=grain[1])
        manifest = newest(store, KEYS)
        assert manifest is not None
        reader = Reader(store, manifest, threads=2)
        boxes = [(n, *box) for n, s in tree.items() for box in grid(s["wanted"], s["shape"])]
        for (name, offsets, sizes), got in zip(boxes, reader.read_many(boxes), strict=True):
            assert same_bits(got, part_of(model[name], offsets, sizes))
        assert params_sha256(reader, model) == tensors_sha256(sorted(model.items()))
        held = [tensors_in(store.root / key) for key in store.list("d/")]
        assert verify_checkpoint(store, KEYS, 1).findings == ()
        assert sum(t.numel() for file in held for t in file.values()) == sum(
            t.numel() for t in model.values()
        )


def test_segments_are_bounded_and_open_as_safetensors(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    big = torch.arange(1000, dtype=torch.float64).reshape(10, 100)
    small = {f"b{i}": torch.full((3,), i, dtype=torch.bfloat16) for i in range(10)}
    made = save(
        store,
        [[*(whole(name, t) for name, t in small.items()), whole("big", big)]],
        segment_bytes=1600,
    )
    files = [tensors_in(tmp_path / key) for key in made.segments]
    for file in files:
        assert sum(t.numel() * t.element_size() for t in file.values()) <= 1600
    assert len(files) == 6  # five of two rows each, and all of the small ones in one
    rows = torch.cat(
        [file[f"big[{r}:{r + 2},0:100]"] for r, file in zip(range(0, 10, 2), files, strict=False)]
    )
    assert torch.equal(rows, big)
    assert {name: t.tolist() for name, t in files[-1].items()} == {
        name: t.tolist() for name, t in small.items()
    }


def test_names_that_look_like_parts_do_not_collide(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    v = torch.tensor([1.0, 2.0, 3.0])
    parts = [
        (TensorSlice("w", (3,), "float32", (0,), (2,)), v[:2]),
        (TensorSlice("w", (3,), "float32", (2,), (1,)), v[2:]),
        whole("w[0:2]", v * 10),
    ]
    reader = Reader(store, save(store, [parts]))
    assert reader.read_full("w").tolist() == [1.0, 2.0, 3.0]
    assert reader.read_full("w[0:2]").tolist() == [10.0, 20.0, 30.0]
    (file,) = (tensors_in(tmp_path / key) for key in store.list("d/"))
    assert len(file) == 3


@pytest.mark.parametrize(
    "given", [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(3, device="meta")]
)
def test_writer_refuses_a_tensor_that_is_not_its_slice(tmp_path: Path, given: torch.Tensor) -> None:
    part = TensorSlice("w", (6,), "float32", (0,), (3,))
    with pytest.raises(SliceError, match="its slice says"):
        save(LocalStore(tmp_path), [[(part, given)]])


class Counting(LocalStore):
    """Notes every range read; spoils the first one when told to."""

    def __init__(self, root: Path, *, spoil_first: bool = False) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int]] = []
        self.spoil_first = spoil_first

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads.append((start, start + length))
        data = super().get_range(key, start, length)
        if self.spoil_first and len(self.reads) == 1:
            return bytes([data[0] ^ 1]) + data[1:]
        return data


def test_reads_only_the_blocks_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointing.read.reader._REQUEST_BYTES", 128)
    table = torch.arange(64 * 64, dtype=torch.int64).reshape(64, 64)  # rows of 512 bytes
    made = save(LocalStore(tmp_path), [[whole("t", table)]], block_bytes=256)
    (begin,) = (part.begin for part in made.parts_of("t"))

    store = Counting(tmp_path)
    got = Reader(store, made).read("t", (10, 0), (4, 64))
    assert torch.equal(got, table[10:14])
    low, high = begin + 10 * 512, begin + 14 * 512
    assert store.reads == [(low // 256 * 256, -(-high // 256) * 256)]

    store = Counting(tmp_path)
    got = Reader(store, made).read("t", (0, 8), (64, 2))  # a column: one or two blocks a row
    assert torch.equal(got, table[:, 8:10])
    assert len(store.reads) == 64
    assert sum(stop - start for start, stop in store.reads) <= 64 * 512

    store = Counting(tmp_path)
    pairs = [("t", (r, 0), (1, 64)) for r in range(64)]
    assert torch.equal(torch.cat(Reader(store, made).read_many(pairs)), table)
    assert len(store.reads) == 1  # neighbours are read together


def test_a_flip_on_the_way_is_read_again(tmp_path: Path) -> None:
    made = save(LocalStore(tmp_path), [[whole("t", torch.arange(9))]])
    store = Counting(tmp_path, spoil_first=True)
    assert Reader(store, made).read_full("t").tolist() == list(range(9))
    assert len(store.reads) == 2


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    model = {
        "w": random_bits((40, 25), "float32", 1),
        "scale": random_bits((), "float64", 2),
        "mask": random_bits((33,), "bool", 3),
    }
    store = LocalStore(tmp_path)
    left = TensorSlice("w", (40, 25), "float32", (0, 0), (17, 25))
    right = TensorSlice("w", (40, 25), "float32", (17, 0), (23, 25))
    made = save(
        store,
        [
            [(left, model["w"][:17]), whole("scale", model["scale"])],
            [(right, model["w"][17:]), whole("mask", model["mask"])],
        ],
        segment_bytes=1700,
        block_bytes=512,
    )
    assert len(made.segments) == 4
    rng = random.Random(5)
    ends = {key: segment.table.begin for key, segment in made.segments.items() if segment.table}
    places = [(key, i) for key in store.list("") for i in range(ends.get(key, store.size(key)))]
    manifest_places = [place for place in places if place[0].startswith("m/")]
    caught = 0
    for key, at in rng.sample(places, 150) + rng.sample(manifest_places, 50):
        path = tmp_path / key
        sound = path.read_bytes()
        flipped = bytes([sound[at] ^ (1 << rng.randrange(8))])
        path.write_bytes(sound[:at] + flipped + sound[at + 1 :])
        with pytest.raises(CorruptError) as error:
            reader = Reader(store, load_manifest(store, KEYS, 1), threads=1)
            reader.read_many([(n, (0,) * t.ndim, tuple(t.shape)) for n, t in model.items()])
        assert error.value.key == key
        if key.startswith("d/"):
            assert error.value.block == at // 512
            assert error.value.byte_range == (
                at // 512 * 512,
                min(at // 512 * 512 + 512, ends[key]),
            )
        else:
            assert newest(store, KEYS) is None
        path.write_bytes(sound)
        caught += 1
    assert caught == 200
    assert all(same_bits(Reader(store, made).read_full(n), t) for n, t in model.items())


def test_truncated_and_missing_segments(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    made = save(store, [[whole("t", torch.arange(100))]])
    (key,) = made.segments
    path = tmp_path / key
    path.write_bytes(path.read_bytes()[: made.segments[key].checked_bytes - 1])
    with pytest.raises(CorruptError, match=r"block 0.*: [0-9]+ of [0-9]+ bytes came, twice"):
        Reader(store, made).read_full("t")
    path.unlink()
    with pytest.raises(MissingError, match=key):
        Reader(store, made).read_full("t")


def test_reader_refuses_what_is_not_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    reader = Reader(store, save(store, [[whole("t", torch.arange(4))]]))
    with pytest.raises(IncompatibleError, match="absent in the checkpoint of step 1"):
        reader.read_full("u")
    with pytest.raises(SliceError, match="not inside"):
        reader.read("t", (2,), (3,))
    with pytest.raises(SliceError, match="not inside"):
        reader.read("t", (0, 0), (1, 1))


def test_a_gap_is_never_filled_with_old_memory(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    made = save(store, [[whole("t", torch.arange(4))]])
    without = dataclasses.replace(made, slices=made.slices[:0])
    with pytest.raises(CheckpointError, match="0 of the 4 elements"):
        Reader(store, without).read_full("t")


def test_params_sha256_depends_on_name_dtype_shape_and_bits_only(tmp_path: Path) -> None:
    a, b = torch.arange(6, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)
    reader = Reader(
        LocalStore(tmp_path), save(LocalStore(tmp_path), [[whole("a", a)], [whole("b", b)]])
    )
    raw = b"a\0float32\x006\0" + a.numpy().tobytes() + b"b\0int64\x002\0" + b.numpy().tobytes()
    assert params_sha256(reader, ["b", "a"]) == hashlib.sha256(raw).hexdigest()
    others = [("c", a), ("a", a.double()), ("a", a.reshape(2, 3)), ("a", a + 1)]
    assert tensors_sha256([("a", a)]) not in {tensors_sha256([other]) for other in others}
