from __future__ import annotations

import builtins
import os
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import (
    Keys,
    NotCommittedError,
    ProtectedError,
    Reader,
    StoreUnavailableError,
    Survey,
    Surveyor,
    TensorSlice,
    claim_for_import,
    commit,
    delete_checkpoint,
    list_steps,
    load_manifest,
    newest,
    note_verified,
    pin,
    plan_retention,
    plan_segments,
    retire,
    set_aside,
    set_foreign_aside,
    write_slices,
)
from checkpointing.retention.retire import sweep_orphans, sweep_uncommitted
from checkpointing.stores.local import LocalStore
from tests.support.small_disk import fill, small_disk

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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_can_be_deleted_from(tmp_path: Path) -> None:
    """To say who deletes takes room, too."""
    store = LocalStore(tmp_path)
    with small_disk(tmp_path, 256 << 10):
        for step in (10, 20, 30, 40, 50):
            write(store, step)
        pin(store, KEYS, 10)
        fill(tmp_path / "filler")
        with pytest.raises(StoreUnavailableError, match="No space left"):
            pin(store, KEYS, 20)
        with pytest.raises(ProtectedError, match="pinned"):
            delete_checkpoint(store, KEYS, 10)
        delete_checkpoint(store, KEYS, 20)
        assert not [key for key in store.list("") if KEYS.step_of(key) == 20]
        fill(tmp_path / "filler")
        surveyor = Surveyor(store=store, keys=KEYS)
        assert retire(surveyor, keep_last=1, keep_every=None, up_to_step=50) == [30, 40]
        assert list_steps(store, KEYS) == [10, 50]


def test_sweep_without_a_checkpoint_takes_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, 10, publish=False)
    assert sweep(store, 10**6) == []
    assert len(store.list("d/")) == 1


def test_what_earlier_generations_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    """A writer of the first generation of the run may be at work when it is swept."""
    store = LocalStore(tmp_path)
    write(store, 10)  # by generation 0
    left, *own = (
        KEYS.segment(rank=0, step=20, generation=generation, attempt=0, index=0)
        for generation in (1, 2, 3)
    )
    for key in (left, *own, "d/readme"):
        store.put(key, [b"."])
    before = set(store.list(""))
    assert sweep_orphans(Surveyor(store=store, keys=KEYS), 2) == [left]
    assert set(store.list("")) == before - {left}


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


class Listed(LocalStore):
    """Counts how often all segments were listed."""

    times = 0

    def list(self, prefix: str) -> builtins.list[str]:
        self.times += prefix == KEYS.data
        return super().list(prefix)


def test_all_segments_are_listed_only_where_what_protected_some_is_gone(tmp_path: Path) -> None:
    """A run deletes what a record refers to with it. What somebody else takes away is noticed."""
    store = Listed(tmp_path)
    surveyor = Surveyor(store=store, keys=KEYS)

    def steps_after(step: int) -> tuple[list[int | None], int]:
        before = store.times
        write(store, step)
        retire(surveyor, keep_last=2, keep_every=100, up_to_step=step)
        times = store.times - before
        return [KEYS.step_of(key) for key in LocalStore(tmp_path).list("d/")], times

    assert steps_after(100) == ([100], 1)
    assert steps_after(101) == ([100, 101], 0)
    assert steps_after(102) == ([100, 101, 102], 0)
    assert steps_after(103) == ([100, 102, 103], 0)
    store.delete(KEYS.commit(100))  # by hand
    assert steps_after(104) == ([103, 104], 1)
    store.put(KEYS.commit(103) + ".foreign", [store.get(KEYS.commit(103))])
    assert steps_after(105) == ([103, 104, 105], 0)
    assert steps_after(106) == ([103, 105, 106], 0)
    store.delete(KEYS.commit(103) + ".foreign")
    assert steps_after(107) == ([106, 107], 1)
    store.put(KEYS.commit(107), [b"{"])
    surveyor.forget(107)  # as one that is damaged before it is read
    assert steps_after(108) == ([106, 107, 108], 1)
    assert steps_after(109) == ([108, 109], 1), "it had protected those of 106, too"
    assert steps_after(110) == ([109, 110], 0)


def test_a_deletion_that_failed_is_finished_by_the_next_retention(tmp_path: Path) -> None:
    class Refuses(LocalStore):
        refused = False

        def delete_many(self, keys: Iterable[str]) -> None:
            if self.refused:
                self.refused = False
                raise StoreUnavailableError("d/", None, "no answer")
            super().delete_many(keys)

    store = Refuses(tmp_path)
    surveyor = Surveyor(store=store, keys=KEYS)
    write(store, 10)
    retire(surveyor, keep_last=1, keep_every=10, up_to_step=10)
    write(store, 15)
    store.put(KEYS.commit(15), [b"{"])  # nobody knows what it referred to
    write(store, 20)
    store.refused = True
    with pytest.raises(StoreUnavailableError):
        retire(surveyor, keep_last=1, keep_every=10, up_to_step=20)
    assert not store.refused and list_steps(store, KEYS) == [10, 20]
    assert [KEYS.step_of(key) for key in store.list("d/")] == [10, 15, 20]
    write(store, 30)
    assert retire(surveyor, keep_last=1, keep_every=10, up_to_step=30) == []
    assert [KEYS.step_of(key) for key in store.list("d/")] == [10, 20, 30]


def test_a_claim_of_an_import_that_is_gone_leaves_its_segments_to_the_next(tmp_path: Path) -> None:
    store = Listed(tmp_path)
    surveyor = Surveyor(store=store, keys=KEYS)
    times = []
    with claim_for_import(store, KEYS, 15):
        for step in (10, 20, 30):
            write(store, step)
            write(store, 15, publish=False)
            retire(surveyor, keep_last=1, keep_every=None, up_to_step=step)
            times.append(store.times)
        assert [KEYS.step_of(key) for key in store.list("d/")] == [15, 30]
    for step in (40, 50):
        write(store, step)
        before = store.times
        retire(surveyor, keep_last=1, keep_every=None, up_to_step=step)
        times.append(store.times - before)
    assert times == [1, 1, 1, 1, 0]
    assert [KEYS.step_of(key) for key in LocalStore(tmp_path).list("d/")] == [50]


def test_a_plan_looks_only_at_records_that_may_refer_to_what_goes() -> None:
    class Watched(dict[int, frozenset[str]]):
        def __getitem__(self, step: int) -> frozenset[str]:
            looked.append(step)
            return super().__getitem__(step)

    def segment(step: int) -> str:
        return KEYS.segment(rank=0, step=step, generation=0, attempt=0, index=0)

    looked = list[int]()
    frozen = segment(1)
    records = {step: frozenset([frozen, segment(step)]) for step in range(1, 1001)}
    gone = records.pop(998)
    rest = Survey(segments=Watched(records), unreadable=frozenset())
    assert plan_segments(gone, rest, KEYS) == [segment(998)]
    assert sorted(looked) == [1, 999, 1000]


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


def test_a_foreign_record_with_the_key_of_an_earlier_one_guards_its_own_segments(
    tmp_path: Path,
) -> None:
    """Somebody has deleted the earlier one, and its step was committed and set aside anew."""
    store = LocalStore(tmp_path)
    surveyor = Surveyor(store=store, keys=KEYS)
    for attempt, newest_step in enumerate((20, 30)):
        write(store, 10, attempt=attempt)
        surveyor.forget(10)
        (segment,) = load_manifest(store, KEYS, 10).segments
        set_foreign_aside(store, KEYS, 10)
        write(store, newest_step)
        retire(surveyor, keep_last=1, keep_every=None, up_to_step=newest_step, littered=attempt > 0)
        assert [key for key in store.list("d/") if KEYS.step_of(key) == 10] == [segment]
        store.delete(f"{KEYS.commit(10)}.foreign")


def test_a_retention_reads_notes_once_and_claims_once_for_each_look(tmp_path: Path) -> None:
    """It looks twice, for a sweep must see what was claimed before it listed."""
    read = Counter[str]()

    class Watched(LocalStore):
        def get(self, key: str) -> bytes:
            read[key] += 1
            return super().get(key)

    store = LocalStore(tmp_path)
    for step in (10, 20, 30):
        write(store, step)
        note_verified(store, KEYS, load_manifest(store, KEYS, step))
    pin(store, KEYS, 10)
    surveyor = Surveyor(store=Watched(tmp_path), keys=KEYS)
    assert retire(surveyor, keep_last=1, keep_every=None, up_to_step=30) == [20]
    records = {KEYS.commit(step): 1 for step in (10, 20, 30)}
    notes = {KEYS.verified(step): 1 for step in (10, 20, 30)}
    assert read == {**records, **notes, KEYS.claim(10): 2}


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


def test_records_are_read_beside_each_other(tmp_path: Path) -> None:
    """A coordinator's first retention reads all that are kept. One that is damaged holds up none,
    and where the store fails the survey does."""
    met = threading.Barrier(4)

    class Slow(LocalStore):
        def get(self, key: str) -> bytes:
            if key == KEYS.commit(60):
                raise StoreUnavailableError(key, None, "it is away")
            data = super().get(key)
            if key != KEYS.commit(50):  # which is read twice
                met.wait(30)
            return data

    store = LocalStore(tmp_path)
    for step in (10, 20, 30, 40):
        write(store, step)
    store.put(KEYS.commit(50), [b"damaged"])
    survey = Surveyor(store=Slow(tmp_path), keys=KEYS).survey()
    assert survey.steps == [10, 20, 30, 40, 50] and survey.unreadable == {50}
    store.put(KEYS.commit(60), [b"out of reach"])
    with pytest.raises(StoreUnavailableError, match="it is away"):
        Surveyor(store=Slow(tmp_path), keys=KEYS).survey()
