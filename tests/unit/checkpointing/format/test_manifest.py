"""The commit record: its columns, what is refused of one that was written wrong, and old ones."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import (
    CorruptError,
    Keys,
    Manifest,
    Reader,
    is_sound,
    list_steps,
    load_manifest,
    newest,
    verify_checkpoint,
)
from checkpointing.format.slices import pack, unpack
from checkpointing.stores.local import LocalStore
from tests.support.sealed import seal, unsealed
from tests.support.tiny_checkpoint import KEYS, STEP, write_state

OLD = Path(__file__).parents[3] / "data" / "checkpoints-schema-2"
"""Two steps by two writers of the version before; `frozen` is written with the first only."""


@given(st.lists(st.integers(0, (1 << 62) - 1)))
def test_columns_come_back(numbers: list[int]) -> None:
    column = np.array(numbers, dtype=np.int64)
    assert unpack(pack(column), len(numbers)).tolist() == numbers


@pytest.mark.parametrize("count", [2, 4, 10**12])
def test_a_column_of_another_length_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="not of"):
        unpack(pack(np.arange(3)), count)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    tensors = {"w": torch.randn(33, 17), "s": torch.zeros(1), "empty": torch.zeros(0, 3)}
    write_state(store, tensors, segment_bytes=512, block_bytes=256)
    return store


def test_a_manifest_comes_back(store: LocalStore) -> None:
    made = load_manifest(store, KEYS, STEP)
    assert Manifest.from_bytes(made.to_bytes(), "k") == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.sha256 == pickle.loads(pickle.dumps(made)).sha256


def to(place: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Sets what is at a path in a record."""

    def change(body: dict[str, Any]) -> None:
        at: Any = body
        *path, last = (int(one) if one.isdigit() else one for one in place.split("."))
        for part in path:
            at = at[part]
        at[last] = value

    return change


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        at = body
        for part in path[:-1]:
            at = at[part]
        del at[path[-1]]

    return change


def twice(body: dict[str, Any]) -> None:
    body["segments"][1]["key"] = body["segments"][0]["key"]


WRONG_VALUES: dict[str, list[Any]] = {
    **{key: [-1, 1.5, "7", None] for key in ("step", "generation", "attempt")},
    "schema": [3.0, "3", True, None],
    "training_state": [[], None, 3],
    "versions": [[], {"torch": 2}],
    "committed_at": [float("nan"), float("inf"), "now", []],
    "segments": [{}, None, [1]],
    "segments.0.key": [7, None],
    "segments.0.size_bytes": [-1, 0, 10**30, 1.0],
    "segments.0.block_bytes": [0, -256, 1, 256.0, None],
    "segments.0.crcs": [[], [-1, 0, 0], ["a", "b", "c"], None, 5],
    "segments.0.crcs.0": [1 << 32],
    "segments.0.table": [{}, [], 1],
    "segments.0.table.begin": [-8, 8, 10**30, None],
    "segments.0.table.piece_bytes": [0, 3, -1, 64, None],
    "segments.0.table.crc32": [-1, 1 << 32, "x"],
    "tensors": [{}, [], None, [["w", [[33, 17], "float32"]]], [1]],
    "tensors.0.1.0": [[-1], [1.5], None, [1 << 62, 1 << 62], [10**40]],
    "tensors.0.1.1": ["object", "float99", None, 4],
    "tensors.2.1.0": [[32, 17]],
    "slices": [{}, [], None],
    "slices.count": [0, 1, -1, 10**15, 1.0, "3", None],
    "slices.tensor": ["", "AAAA", "§", 5, None, []],
    "slices.offsets": [[], None, "x"],
}
"""What is at a path in a record -> what it must not be."""

WRONG = [
    *[to(path, value) for path, values in WRONG_VALUES.items() for value in values],
    *[without(key) for key in ("step", "segments", "tensors", "slices", "training_state")],
    *[without("slices", key) for key in ("count", "tensor", "offsets", "sizes", "begin")],
    twice,
]


@pytest.mark.parametrize("change", WRONG)
def test_a_sealed_record_that_is_malformed_is_corrupt_and_passed_over(
    store: LocalStore, change: Callable[[dict[str, Any]], None]
) -> None:
    key, later = KEYS.commit(STEP), KEYS.commit(STEP + 1)
    body = unsealed(store.get(key))
    change(body)
    with pytest.raises(CorruptError):
        Manifest.from_bytes(seal(body), "k")
    assert is_sound(seal(body)), "it may be a later version that wrote it"
    store.put(later, [seal(body)])
    (finding,) = verify_checkpoint(store, KEYS, STEP + 1).findings
    assert (finding.key, finding.check) == (later, "manifest")
    found = newest(store, KEYS)
    assert found is not None and found.step == STEP


@pytest.mark.parametrize(
    ("path", "bad"),
    [
        ("tensor", 99),
        ("tensor", -1),
        ("segment", 99),
        ("segment", -1),
        ("begin", -1),
        ("begin", 1 << 20),
        ("begin", (1 << 62) + 5),
        *[
            (f"{column}.{axis}", bad)
            for column in ("offsets", "sizes")
            for axis in (0, 1)
            for bad in (-1, 34, 1 << 62)
        ],
    ],
)
def test_a_number_that_points_nowhere_is_corrupt(store: LocalStore, path: str, bad: int) -> None:
    body = unsealed(store.get(KEYS.commit(STEP)))
    columns, count = body["slices"], body["slices"]["count"]
    name, _, axis = path.partition(".")
    column = unpack(columns[name][int(axis)] if axis else columns[name], count).astype(np.int64)
    for row in (0, count - 1):
        changed = column.copy()
        changed[row] = bad
        to(f"slices.{path}", pack(changed))(body)
        with pytest.raises(CorruptError):
            Manifest.from_bytes(seal(body), "k")
    to(f"slices.{path}", pack(column))(body)
    assert Manifest.from_bytes(seal(body), "k").step == STEP


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"7", b"{}", b'{"schema":[]}', b'{"schema":NaN}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_record_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptError, match="not a manifest"):
        Manifest.from_bytes(raw, "k")
    assert not is_sound(raw)


def test_a_record_of_a_later_version_is_whole_though_it_cannot_be_read(store: LocalStore) -> None:
    raw = store.get(KEYS.commit(STEP))
    later = raw.replace(b'"float32"', b'"float99"')
    assert is_sound(raw) and not is_sound(later), "its seal is of other bytes"
    said = r"of schema 3 that was written wrong, or by a later version \(KeyError: 'float99'\); "
    with pytest.raises(CorruptError, match=rf"{said}it names \{{.*\}}\. Read it with the version"):
        Manifest.from_bytes(seal(unsealed(later)), "k")
    assert is_sound(seal(unsealed(later)))


def test_checkpoints_of_the_version_before_are_read(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    store, keys = LocalStore(tmp_path / "run"), Keys()
    assert list_steps(store, keys) == [10, 20]
    for step in (10, 20):
        assert verify_checkpoint(store, keys, step).findings == ()
        reader = Reader(store, load_manifest(store, keys, step))
        expected = {
            "frozen": torch.arange(60.0).reshape(6, 10),
            "w": (torch.arange(77.0) + step).reshape(11, 7),
            "s": torch.tensor(float(step)),
            "h": (torch.arange(12.0) + step).bfloat16(),
            "empty": torch.zeros(0, 3),
        }
        assert reader.manifest.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(reader.read_full(name), tensor)
        assert torch.equal(reader.read("w", (5, 2), (3, 4)), expected["w"][5:8, 2:6])
    first, second = (load_manifest(store, keys, step) for step in (10, 20))
    assert {p.segment for p in first.parts_of("frozen")} <= second.segments.keys()


@pytest.mark.parametrize(
    "row",
    [
        [[0, 0], [3, 10], 99, 120, 240],
        [[0, 0], [3, 10], -1, 120, 240],
        [[-1, 0], [3, 10], 0, 120, 240],
        [[0], [30], 0, 120, 240],
        [[0, 0], [3, 10], 0, 120, 248],
        [[0, 0], [3, 10], 0, 10**6, 10**6 + 120],
        [[0, 0], [3, 10], 0, 0.5, 120.5],
        [[0, 0], [3, 10], 0, 120],
        None,
    ],
)
def test_a_wrong_row_of_the_version_before_is_corrupt(row: object) -> None:
    body = unsealed((OLD / Keys().commit(10)).read_bytes())
    assert Manifest.from_bytes(seal(body), "k").step == 10
    body["tensors"]["frozen"]["slices"][0] = row
    with pytest.raises(CorruptError, match="written wrong"):
        Manifest.from_bytes(seal(body), "k")


def test_what_is_the_same_for_each_slice_takes_no_room() -> None:
    """Of a grid, the steps between its cells."""
    assert len(pack(np.arange(4096) * 37)) <= 100
