from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import (
    AlreadyCommittedError,
    CorruptError,
    IncompatibleError,
    Keys,
    Manifest,
    NotCommittedError,
    Receipt,
    SliceError,
    StaleGenerationError,
    TensorSlice,
    check_compatible,
    commit,
    list_steps,
    load_manifest,
    newest,
    set_aside,
    set_foreign_aside,
    write_slices,
)
from checkpointing.format.boxes import TensorInfo
from checkpointing.format.slices import unpack
from checkpointing.read.catalogue import is_foreign
from checkpointing.stores.local import LocalStore

KEYS = Keys()
STATE = {"step": 10, "lr": 1e-3, "order": {"10": "a", "2": "b"}}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def half(
    store: LocalStore, rank: int, step: int, *, generation: int = 0, attempt: int = 0
) -> Receipt:
    """Rank 0 or 1 writes its half of a vector of six."""
    part = TensorSlice("w", (6,), "float32", (3 * rank,), (3,))
    return write_slices(
        store,
        KEYS,
        rank=rank,
        step=step,
        generation=generation,
        attempt=attempt,
        slices=[(part, torch.full((3,), float(step + rank)))],
    )


def publish(
    store: LocalStore, step: int, *, generation: int = 0, attempt: int = 0, **changes: Any
) -> Manifest:
    receipts = [half(store, r, step, generation=generation, attempt=attempt) for r in (0, 1)]
    arguments: dict[str, Any] = {
        "step": step,
        "generation": generation,
        "receipts": receipts,
        "training_state": STATE,
        "versions": {"torch": "2.13"},
    }
    return commit(store, KEYS, **{**arguments, **changes})


def test_commit_is_found_again_whole(store: LocalStore) -> None:
    made = publish(store, 10, generation=4, attempt=2)
    found = newest(store, KEYS)
    assert found == made == load_manifest(store, KEYS, 10)
    assert (made.step, made.generation, made.attempt) == (10, 4, 2)
    assert made.training_state == STATE
    assert made.versions == {"torch": "2.13"}
    assert made.tensors == {"w": ((6,), "float32")}


def test_nothing_shows_before_the_last_call(store: LocalStore) -> None:
    assert newest(store, KEYS) is None
    half(store, 0, 10)  # killed after one rank's segments
    assert newest(store, KEYS) is None
    half(store, 1, 10)  # killed after all segments, before the manifest
    assert newest(store, KEYS) is None
    assert list_steps(store, KEYS) == []
    (store.root / "m").mkdir()  # killed while the manifest was being written
    (store.root / (KEYS.commit(10) + ".0f.part")).write_bytes(b'{"schema":3')
    assert newest(store, KEYS) is None
    assert list_steps(store, KEYS) == []
    publish(store, 10, attempt=1)
    found = newest(store, KEYS)
    assert found is not None
    assert found.attempt == 1


def test_commit_refuses_what_does_not_tile(store: LocalStore) -> None:
    left, right = half(store, 0, 10), half(store, 1, 10)
    for receipts, message in (([left], "3 of the 6"), ([left, right, left], "overlap")):
        with pytest.raises(SliceError, match=message):
            publish(store, 10, receipts=receipts)
    changed = dataclasses.replace(right.slices, infos=(TensorInfo((6,), "int32"),))
    other = dataclasses.replace(right, slices=changed)
    with pytest.raises(SliceError, match=r"int32 \[6\] on rank 1, float32 \[6\] elsewhere"):
        publish(store, 10, receipts=[left, other])
    assert newest(store, KEYS) is None


def test_commit_refuses_mixed_receipts_and_foreign_state(store: LocalStore) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"receipts": [half(store, 0, 10), half(store, 1, 10, attempt=1)]}, "2 receipts"),
        ({"receipts": []}, "0 receipts"),
        ({"generation": 0, "receipts": [half(store, 0, 10, generation=1)]}, "generation 0 was"),
        ({"training_state": {"loss": float("nan")}}, "not JSON"),
        ({"training_state": {"rng": torch.zeros(1)}}, "not JSON"),
    ]
    for changes, message in cases:
        with pytest.raises(NotCommittedError, match=message):
            publish(store, 10, **changes)
    assert newest(store, KEYS) is None


def test_same_again_is_fine_and_another_is_not(store: LocalStore) -> None:
    made = publish(store, 10)
    assert publish(store, 10) == made
    with pytest.raises(AlreadyCommittedError, match="attempt 0; this is generation 0, attempt 1"):
        publish(store, 10, attempt=1)
    with pytest.raises(AlreadyCommittedError):
        publish(store, 10, training_state={"step": 11})
    assert newest(store, KEYS) == made


def test_order_of_receipts_does_not_matter(store: LocalStore) -> None:
    receipts = [half(store, rank, 10) for rank in (0, 1)]
    made = publish(store, 10, receipts=receipts)
    assert publish(store, 10, receipts=receipts[::-1]) == made


def test_stale_generation_cannot_publish(store: LocalStore) -> None:
    publish(store, 20, generation=3)
    for step in (10, 20):
        with pytest.raises(StaleGenerationError, match="generation 3 has committed step 20"):
            publish(store, step, generation=2)
    assert list_steps(store, KEYS) == [20]
    publish(store, 10, generation=3)
    assert list_steps(store, KEYS) == [10, 20]


def test_generations_of_another_run_are_no_measure(store: LocalStore) -> None:
    mine, other = ({"run": {"name": "r", "id": name}} for name in ("mine", "other"))
    publish(store, 20, generation=3, training_state=mine)
    publish(store, 30, generation=9, training_state=other)
    with pytest.raises(StaleGenerationError, match="generation 3 has committed step 20"):
        publish(store, 10, generation=2, training_state=mine)
    publish(store, 25, generation=3, training_state=mine)
    assert list_steps(store, KEYS) == [20, 25, 30]


def test_unreadable_manifests_are_passed_over(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    good = publish(store, 10)
    for step in (20, 30, 40, 50, 60):
        publish(store, step)
    raw = store.get(KEYS.commit(20))
    store.put(KEYS.commit(20), [raw[: len(raw) // 2]])
    store.put(KEYS.commit(30), [b"\xff\x00 not text"])
    store.put(KEYS.commit(40), [store.get(KEYS.commit(40)).replace(b'"schema":3', b'"schema":4')])
    store.put(KEYS.commit(50), [raw])
    store.put(KEYS.commit(60), [b"[1, 2]"])
    store.put("m/readme.json", [b"{}"])
    with caplog.at_level(logging.WARNING):
        assert newest(store, KEYS) == good
    assert len(caplog.records) == 5
    assert list_steps(store, KEYS) == [10, 20, 30, 40, 50, 60]
    with pytest.raises(CorruptError, match="schema 4"):
        load_manifest(store, KEYS, 40)
    with pytest.raises(CorruptError, match="manifest of step 20"):
        load_manifest(store, KEYS, 50)
    with pytest.raises(NotCommittedError):
        load_manifest(store, KEYS, 70)
    with pytest.raises(AlreadyCommittedError, match="not readable"):
        publish(store, 30)


def test_receipt_survives_pickle_and_json(store: LocalStore) -> None:
    receipt = half(store, 1, 10)
    assert pickle.loads(pickle.dumps(receipt)) == receipt
    assert Receipt.from_dict(receipt.to_dict()) == receipt
    assert Receipt.from_dict(json.loads(json.dumps(receipt.to_dict()))) == receipt


def test_manifest_is_plain_json_with_the_promised_fields(store: LocalStore) -> None:
    publish(store, 10)
    record = json.loads(store.get(KEYS.commit(10)))
    assert record["schema"] == 3
    assert record["tensors"] == [["w", [[6], "float32"]]]
    columns = record["slices"]
    assert columns["count"] == 2
    assert [unpack(column, 2).tolist() for column in columns["offsets"]] == [[0, 3]]
    assert [unpack(column, 2).tolist() for column in columns["sizes"]] == [[3, 3]]
    places = zip(unpack(columns["segment"], 2), unpack(columns["begin"], 2), strict=True)
    for rank, (number, begin) in enumerate(places):
        segment = record["segments"][number]
        assert len(store.get(segment["key"])) == segment["size_bytes"]
        held = store.get_range(segment["key"], int(begin), 12)
        assert held == torch.full((3,), 10.0 + rank).numpy().tobytes()


def test_check_compatible(store: LocalStore) -> None:
    made = publish(store, 10)
    check_compatible(made, {"w": ((6,), "float32")})
    cases: list[tuple[dict[str, tuple[tuple[int, ...], str]], str, int]] = [
        ({"w": ((5,), "float32")}, "w", 1),
        ({"w": ((6,), "bfloat16")}, "w", 1),
        ({}, "w", 1),
        ({"w": ((6,), "float32"), "b": ((), "int64")}, "b", 1),
        ({"z": ((6,), "float32"), "x": ((6,), "float32")}, "w", 3),
    ]
    for model, first, count in cases:
        with pytest.raises(IncompatibleError) as caught:
            check_compatible(made, model)
        assert (caught.value.name, caught.value.count) == (first, count)


def test_a_record_that_is_set_aside_makes_room_and_is_kept(store: LocalStore) -> None:
    publish(store, 10)
    record = publish(store, 20)
    set_aside(store, KEYS, 20)
    set_aside(store, KEYS, 20)  # the answer to the first call may be lost
    assert list_steps(store, KEYS) == [10]
    assert store.get(f"{KEYS.commit(20)}.unreadable") == record.to_bytes()
    publish(store, 20, generation=1)
    assert load_manifest(store, KEYS, 20).generation == 1


def test_foreign_records_of_one_step_do_not_overwrite_each_other(store: LocalStore) -> None:
    records = []
    for generation in (0, 1, 2):
        records.append(publish(store, 20, generation=generation).to_bytes())
        set_foreign_aside(store, KEYS, 20)
    store.put(KEYS.commit(20), [records[1]])  # a start that was killed had not deleted it yet
    set_foreign_aside(store, KEYS, 20)
    kept = [KEYS.commit(20) + end for end in (".foreign", ".foreign.1", ".foreign.2")]
    assert store.list("m/") == kept
    assert [store.get(key) for key in kept] == records
    assert all(is_foreign(KEYS, key) for key in kept)
    others = (KEYS.commit(20), f"{kept[0]}.0f.part", f"{kept[1]}x", f"x{kept[0]}", "d/foreign")
    assert not any(is_foreign(KEYS, key) for key in others)


def test_commit_refuses_segments_that_are_not_in_its_store(
    store: LocalStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One writer's machine lacks the mount, and it wrote to its own disk."""
    publish(store, 10)
    elsewhere = LocalStore(tmp_path_factory.mktemp("disk"))
    receipts = [half(store, 0, 20, attempt=1), half(elsewhere, 1, 20, attempt=1)]
    with pytest.raises(NotCommittedError, match=r"writer 1 wrote .* is not there .* mounted"):
        publish(store, 20, receipts=receipts)
    assert list_steps(store, KEYS) == [10]
    key = receipts[1].segments[0].key
    store.put(key, [b"short"])
    with pytest.raises(NotCommittedError, match="has 5 bytes there"):
        publish(store, 20, receipts=receipts)
    store.put(key, [elsewhere.get(key)])
    made = publish(store, 20, receipts=receipts)
    assert publish(store, 20, receipts=receipts) == made == newest(store, KEYS)


def test_the_newest_before_a_step(store: LocalStore) -> None:
    for step in (10, 20, 30):
        publish(store, step)
    store.put(KEYS.commit(20), [b"{"])
    found = newest(store, KEYS, before=30)
    assert found is not None and found.step == 10
    assert newest(store, KEYS, before=10) is None
