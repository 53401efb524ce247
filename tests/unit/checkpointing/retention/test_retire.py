from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import (
    Keys,
    NotCommittedError,
    Reader,
    Surveyor,
    TensorSlice,
    commit,
    delete_checkpoint,
    list_steps,
    load_manifest,
    newest,
    note_verified,
    plan_retention,
    retire,
    set_aside,
    write_slices,
)
from checkpointing.retention.retire import sweep_uncommitted
from checkpointing.stores.local import LocalStore

KEYS = Keys()


def write(store: LocalStore, step: int, *, attempt: int = 0, publish: bool = True) -> None:
    receipt = write_slices(
        store,
        KEYS,
        rank=0,
        step=step,
        generation=0,
        attempt=attempt,
        slices=[(TensorSlice("w", (3,), "int64", (0,), (3,)), torch.full((3,), step))],
    )
    if publish:
        commit(
            store, KEYS, step=step, generation=0, receipts=[receipt], training_state={}, versions={}
        )


def sweep(store: LocalStore, older_than_step: int) -> list[str]:
    return sweep_uncommitted(Surveyor(store=store, keys=KEYS), older_than_step)


def test_rules() -> None:
    steps = [100, 200, 300, 400, 500, 600]
    assert plan_retention(steps, 2, None, ()) == [100, 200, 300, 400]
    assert plan_retention(steps, 2, 300, ()) == [100, 200, 400]
    assert plan_retention(steps, 1, 300, {200}) == [100, 400, 500]
    assert plan_retention(steps, 9, None, ()) == []
    assert plan_retention([], 2, None, ()) == []
    assert plan_retention(steps, 2, None, (), back_to=[399]) == [100, 200, 400]
    assert plan_retention(steps, 2, None, (), back_to=[50, 399, 200]) == [100, 400]
    assert plan_retention(steps, 2, None, (), back_to=[250], unreadable={200}) == [200, 300, 400]


@given(st.lists(st.integers(0, 50)), st.integers(-1, 5), st.none() | st.integers(1, 9))
def test_newest_always_stays(steps: list[int], keep_last: int, keep_every: int | None) -> None:
    gone = plan_retention(steps, keep_last, keep_every, ())
    assert set(gone) <= set(steps)
    assert not steps or max(steps) not in gone


def test_delete_takes_one_checkpoint(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, 10)
    write(store, 20)
    delete_checkpoint(store, KEYS, 10)
    assert list_steps(store, KEYS) == [20]
    assert all("000000000020" in key for key in store.list(""))
    with pytest.raises(NotCommittedError):
        delete_checkpoint(store, KEYS, 10)


def test_delete_begins_with_the_manifest(tmp_path: Path) -> None:
    class Killed(LocalStore):
        def delete(self, key: str) -> None:
            super().delete(key)
            raise KeyboardInterrupt

    write(LocalStore(tmp_path), 10)
    write(LocalStore(tmp_path), 20)
    with pytest.raises(KeyboardInterrupt):
        delete_checkpoint(Killed(tmp_path), KEYS, 10)
    store = LocalStore(tmp_path)
    assert list_steps(store, KEYS) == [20]
    (left,) = [key for key in store.list("d/") if "000000000010" in key]
    assert sweep(store, 20) == [left, KEYS.claim(10)]


def test_sweep_takes_only_old_uncommitted_data(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, 10, attempt=0, publish=False)
    write(store, 10, attempt=1)
    write(store, 20, publish=False)
    write(store, 30)
    write(store, 40, publish=False)
    dead = KEYS.segment(rank=0, step=10, generation=0, attempt=0, index=0)
    never = KEYS.segment(rank=0, step=20, generation=0, attempt=0, index=0)
    part = KEYS.segment(rank=0, step=10, generation=0, attempt=1, index=1) + ".0f.part"
    record = KEYS.commit(20) + ".0f.part"
    store.put(part, [b"half a segment"])
    store.put(record, [b"half a manifest"])
    store.put("notes/readme", [b"not ours"])

    assert sweep(store, 15) == sorted([dead, part])
    assert sweep(store, 10**6) == sorted([never, record])
    assert sweep(store, 10**6) == []
    assert list_steps(store, KEYS) == [10, 30]
    assert [KEYS.step_of(key) for key in store.list("d/")] == [10, 30, 40]
    last = newest(store, KEYS)
    assert last is not None
    assert Reader(store, last).read_full("w").tolist() == [30, 30, 30]
    assert store.get("notes/readme") == b"not ours"


def test_a_pin_under_way_is_no_rubbish(tmp_path: Path) -> None:
    """It is a file beside the record for a moment; with the record goes what a killed one left."""
    store = LocalStore(tmp_path)
    for step in (10, 20, 30):
        write(store, step)
    pinning = KEYS.claim(10) + ".0f.part"
    store.put(pinning, [b"pinned"])
    assert sweep(store, 30) == []
    delete_checkpoint(store, KEYS, 10)
    assert sweep(store, 30) == [pinning]


def test_sweep_without_a_checkpoint_takes_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, 10, publish=False)
    assert sweep(store, 10**6) == []
    assert len(store.list("d/")) == 1


def test_unreadable_manifest_guards_its_step_until_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, 10)
    write(store, 20)
    store.put(KEYS.commit(10), [b'{"schema": 99}'])
    assert sweep(store, 20) == []
    delete_checkpoint(store, KEYS, 10)
    assert len(sweep(store, 20)) == 1
    assert all("000000000020" in key for key in store.list(""))


def test_what_the_run_went_back_for_guards_its_own_segments_alone(tmp_path: Path) -> None:
    """Or until the run is past where it was, the data of each further checkpoint would stay."""
    store = LocalStore(tmp_path)
    for step in (10, 20, 30, 100):
        write(store, step)
    set_aside(store, KEYS, 30)
    set_aside(store, KEYS, 100)
    surveyor = Surveyor(store=store, keys=KEYS)
    kept = []
    for step in (30, 40, 50, 110, 120):
        write(store, step, attempt=1)
        surveyor.forget(step)
        retire(surveyor, keep_last=2, keep_every=None, up_to_step=step)
        kept.append([KEYS.step_of(key) for key in store.list("d/")])
    assert kept == [
        [20, 30, 30, 100],
        [30, 30, 40, 100],
        [40, 50, 100],
        [50, 100, 110],
        [110, 120],
    ]


def test_a_record_that_was_set_aside_is_read_once(tmp_path: Path) -> None:
    """It may take 100 MB, and stays until the run is past it. Another one of the step is read."""
    read = list[str]()

    class Watched(LocalStore):
        def get(self, key: str) -> bytes:
            read.append(key)
            return super().get(key)

    store = LocalStore(tmp_path)
    surveyor = Surveyor(store=Watched(tmp_path), keys=KEYS)
    for attempt in (0, 1):
        write(store, 10, attempt=attempt)
        (segment,) = load_manifest(store, KEYS, 10).segments
        surveyor.forget(10)
        surveyor.survey()
        set_aside(store, KEYS, 10)
        assert surveyor.survey() == surveyor.survey()
        assert surveyor.survey().aside == {segment}
    assert read.count(f"{KEYS.commit(10)}.unreadable") == 3


def test_a_commit_during_a_survey_costs_it_nothing(tmp_path: Path) -> None:
    """It goes on while a slow store is asked what is verified: what is known of its step may be of
    another record."""

    class Slow(LocalStore):
        def get(self, key: str) -> bytes:
            if key == KEYS.verified(10):
                surveyor.forget(20)
            return super().get(key)

    store = Slow(tmp_path)
    surveyor = Surveyor(store=store, keys=KEYS)
    for step in (10, 20):
        write(store, step)
    note_verified(store, KEYS, load_manifest(store, KEYS, 10))
    survey = surveyor.survey()
    assert survey.steps == [10, 20] and survey.verified == {10}
    assert surveyor.survey() == survey
