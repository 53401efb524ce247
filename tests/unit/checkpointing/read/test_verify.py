from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpointing import (
    CorruptError,
    IncompatibleError,
    Keys,
    MissingError,
    NotCommittedError,
    Reader,
    StoreUnavailableError,
    check_compatible,
    delete_checkpoint,
    give_up,
    list_steps,
    load_manifest,
    newest,
    pin,
    set_aside,
    verify_checkpoint,
)
from checkpointing.format.slices import SavedSlice
from checkpointing.stores.local import LocalStore
from tests.support.sealed import seal, unsealed
from tests.support.tiny_checkpoint import KEYS, STEP, write_state

FLIPS = 1000


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "param/w": torch.randn(33, 17, generator=rng),
        "param/b": torch.randn(17, generator=rng),
        "exp_avg/w": torch.randn(33, 17, generator=rng).bfloat16(),
        "count": torch.arange(5),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    write_state(store, tensors(), segment_bytes=512, block_bytes=256)
    return store


def only_finding(store: LocalStore) -> tuple[str, str, str]:
    checked = verify_checkpoint(store, KEYS, STEP, threads=1)
    (finding,) = checked.findings
    return finding.key, finding.check, finding.fact


def first_segment() -> str:
    return KEYS.segment(rank=0, step=STEP, generation=0, attempt=0, index=0)


def test_a_sound_checkpoint_has_no_findings(store: LocalStore) -> None:
    calls: list[tuple[int, int]] = []
    checked = verify_checkpoint(
        store, KEYS, STEP, threads=3, progress=lambda *done: calls.append(done)
    )
    total = sum(store.size(key) for key in store.list("d/"))
    assert checked.findings == ()
    assert checked.size_bytes == total
    assert calls[-1] == (total, total)
    assert checked.manifest == load_manifest(store, KEYS, STEP)


def test_a_thousand_flips_are_all_found(store: LocalStore) -> None:
    """Bytes are drawn from all objects of a checkpoint as if they were one; of each a bit or more
    changes. Every flip must be found by `verify`; of the segments, every flip by the load, too,
    unless no tensor lies in its block."""
    objects = {key: bytearray(store.get(key)) for key in [*store.list("m/"), *store.list("d/")]}
    places = [(key, at) for key, data in objects.items() for at in range(len(data))]
    rng = random.Random(11)
    found = Counter[str]()
    for key, at in rng.sample(places, FLIPS):
        data = objects[key]
        mask = rng.randrange(1, 256)
        data[at] ^= mask
        (store.root / key).write_bytes(data)
        named, check, _ = only_finding(store)
        assert named == key
        assert check in (["manifest"] if key.startswith("m/") else ["crc32", "table"])
        found[check] += 1
        data[at] ^= mask
        (store.root / key).write_bytes(data)
    assert sum(found.values()) == FLIPS
    assert min(found["manifest"], found["crc32"], found["table"]) > 5
    assert verify_checkpoint(store, KEYS, STEP).findings == ()


def test_a_load_finds_flips_too(store: LocalStore) -> None:
    key = first_segment()
    good = store.get(key)
    manifest = load_manifest(store, KEYS, STEP)
    used = [part for part in manifest.slices if part.segment == key]
    rng = random.Random(12)
    for _ in range(50):
        part: SavedSlice = rng.choice(used)
        data = bytearray(good)
        data[rng.randrange(part.begin, part.end)] ^= 1 << rng.randrange(8)
        (store.root / key).write_bytes(data)
        with pytest.raises(CorruptError, match=r"CRC32 differed") as caught:
            Reader(store, manifest).read_full(part.name)
        assert caught.value.key == key


@pytest.mark.parametrize("keep", [0, 1, 400])
def test_a_truncated_segment(store: LocalStore, keep: int) -> None:
    key = first_segment()
    good = store.get(key)
    (store.root / key).write_bytes(good[:keep])
    assert only_finding(store) == (key, "size", f"{keep} bytes; {len(good)} were written")
    with pytest.raises(CorruptError, match=key):
        Reader(store, load_manifest(store, KEYS, STEP)).read_many(
            [(n, (0,) * t.dim(), tuple(t.shape)) for n, t in tensors().items()]
        )


def test_a_grown_segment(store: LocalStore) -> None:
    with (store.root / first_segment()).open("ab") as file:
        file.write(b"\0")
    assert only_finding(store)[:2] == (first_segment(), "size")


def test_a_missing_segment(store: LocalStore) -> None:
    store.delete(first_segment())
    assert only_finding(store) == (first_segment(), "missing", "no such object")
    with pytest.raises(MissingError, match=first_segment()):
        Reader(store, load_manifest(store, KEYS, STEP)).read_full("param/w")


def test_every_finding_is_told(store: LocalStore) -> None:
    keys = store.list("d/")
    assert len(keys) > 3
    store.delete(keys[0])
    for key in keys[1:3]:
        data = bytearray(store.get(key))
        data[-1] ^= 1
        (store.root / key).write_bytes(data)
    findings = verify_checkpoint(store, KEYS, STEP).findings
    assert {f.key: f.check for f in findings} == {
        keys[0]: "missing",
        keys[1]: "table",
        keys[2]: "table",
    }


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda raw: raw[:-1], "not a manifest"),
        (lambda raw: raw[: len(raw) // 2], "not a manifest"),
        (lambda raw: b"", "0 bytes that are not a manifest"),
        (
            lambda raw: raw.replace(b'"schema":3', b'"schema":4'),
            "schema 4; this version knows 2 and 3 only",
        ),
        (lambda raw: raw.replace(b'"step":7', b'"step":8'), "sha256 differs"),
    ],
)
def test_a_bad_manifest(store: LocalStore, change: object, fact: str) -> None:
    assert callable(change)
    key = KEYS.commit(STEP)
    (store.root / key).write_bytes(change(store.get(key)))
    checked = verify_checkpoint(store, KEYS, STEP)
    (finding,) = checked.findings
    assert (finding.key, finding.check) == (key, "manifest")
    assert checked.manifest is None
    with pytest.raises(CorruptError, match=f"{key}.*{fact}"):
        load_manifest(store, KEYS, STEP)
    assert newest(store, KEYS) is None


def test_no_checkpoint_is_no_finding(store: LocalStore) -> None:
    with pytest.raises(NotCommittedError, match=KEYS.commit(8)):
        verify_checkpoint(store, KEYS, 8)


def test_the_manifest_of_another_step(store: LocalStore) -> None:
    store.put(KEYS.commit(8), [store.get(KEYS.commit(STEP))])
    (finding,) = verify_checkpoint(store, KEYS, 8).findings
    assert finding.fact == "this is the manifest of step 7"


def test_the_manifest_of_another_run(store: LocalStore, tmp_path: Path) -> None:
    other = LocalStore(tmp_path / "other")
    write_state(other, tensors(seed=1), segment_bytes=512, block_bytes=256)
    (store.root / KEYS.commit(STEP)).write_bytes(other.get(KEYS.commit(STEP)))
    findings = verify_checkpoint(store, KEYS, STEP).findings
    assert findings and {finding.check for finding in findings} == {"crc32", "table"}
    with pytest.raises(CorruptError, match="d/"):
        Reader(store, load_manifest(store, KEYS, STEP)).read_full("param/w")


def test_the_checkpoint_of_another_model(store: LocalStore) -> None:
    table = {n: (tuple(t.shape), str(t.dtype)[6:]) for n, t in tensors().items()}
    manifest = load_manifest(store, KEYS, STEP)
    check_compatible(manifest, table)
    table["param/w"] = ((33, 18), "float32")
    with pytest.raises(IncompatibleError, match=r"'param/w': float32 \[33, 17\] in the checkpoint"):
        check_compatible(manifest, table)


def test_a_manifest_with_a_gap(store: LocalStore) -> None:
    manifest = load_manifest(store, KEYS, STEP)
    short = replace(manifest, slices=manifest.slices[:-1])
    store.put(KEYS.commit(STEP), [short.to_bytes()])
    (finding,) = verify_checkpoint(store, KEYS, STEP).findings
    assert (finding.key, finding.check) == (KEYS.commit(STEP), "coverage")


def test_a_manifest_from_before_its_time_was_kept(store: LocalStore) -> None:
    body = unsealed(store.get(KEYS.commit(STEP)))
    del body["committed_at"]
    store.put(KEYS.commit(STEP), [seal(body)])
    assert load_manifest(store, KEYS, STEP).committed_at is None
    assert verify_checkpoint(store, KEYS, STEP).findings == ()


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailableError("k", 5, "Input/output error"),
        CorruptError("k", "bytes changed on their way"),
    ],
)
def test_what_cannot_be_read_is_a_finding(store: LocalStore, error: Exception) -> None:
    class Refusing(LocalStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            if key == first_segment():
                raise error
            return super().get_range(key, start, length)

    findings = verify_checkpoint(Refusing(store.root), Keys(), STEP).findings
    assert {(f.key, f.check) for f in findings} == {(first_segment(), "unreadable")}
    assert all(str(error) in f.fact for f in findings)


def test_a_record_that_is_damaged_on_its_way_is_read_once_more(store: LocalStore) -> None:
    class Flipping(LocalStore):
        gets = 0

        def get(self, key: str) -> bytes:
            data = super().get(key)
            self.gets += 1
            return bytes([data[0] ^ 1]) + data[1:] if self.gets == 1 else data

    flipping = Flipping(store.root)
    found = newest(flipping, KEYS)
    assert found == load_manifest(store, KEYS, STEP) and flipping.gets == 2


@pytest.mark.parametrize("again", [False, True])
def test_one_that_is_deleted_meanwhile_is_not_called_damaged(
    store: LocalStore, again: bool
) -> None:
    """As by the run's retention; or another one of the step takes its place."""

    class Retiring(LocalStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            if STEP in list_steps(store, KEYS):
                delete_checkpoint(store, KEYS, STEP, force=True)
                if again:
                    write_state(store, tensors(1), generation=1)
            return super().get_range(key, start, length)

    with pytest.raises(NotCommittedError, match="while it was read"):
        verify_checkpoint(Retiring(store.root), KEYS, STEP, threads=1)


@pytest.mark.parametrize("pinned", [False, True])
def test_one_that_is_given_up_meanwhile_is_called_damaged(store: LocalStore, pinned: bool) -> None:
    """The run has found it, too: whoever asked must hear of it."""
    key, *_ = load_manifest(store, KEYS, STEP).segments
    path = store.root / key
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])

    class GivenUp(LocalStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            give_up(store, KEYS, STEP)
            return super().get_range(key, start, length)

    if pinned:
        pin(store, KEYS, STEP)

    (finding,) = verify_checkpoint(GivenUp(store.root), KEYS, STEP, threads=1).findings
    assert (finding.key, finding.check) == (key, "crc32")


@pytest.mark.timeout(20)
def test_a_record_that_is_no_file_is_passed_over_and_set_aside(store: LocalStore) -> None:
    write_state(store, tensors(), step=STEP + 1, segment_bytes=512, block_bytes=256)
    record = store.root / KEYS.commit(STEP + 1)
    record.unlink()
    os.mkfifo(record)
    (finding,) = verify_checkpoint(store, KEYS, STEP + 1).findings
    assert (finding.key, finding.check) == (KEYS.commit(STEP + 1), "manifest")
    found = newest(store, KEYS)
    assert found is not None and found.step == STEP
    set_aside(store, KEYS, STEP + 1)
    assert list_steps(store, KEYS) == [STEP]
