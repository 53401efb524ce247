"""Checkpoints that refer to segments of earlier ones, and retention over random histories."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import (
    Keys,
    Manifest,
    NotCommittedError,
    ProtectedError,
    Receipt,
    Survey,
    Surveyor,
    TensorSlice,
    commit,
    delete_checkpoint,
    give_up,
    list_steps,
    load_manifest,
    newest,
    note_verified,
    pin,
    pinned_steps,
    plan_retention,
    plan_segments,
    retire,
    set_foreign_aside,
    sweep_orphans,
    unpin,
    verified_at,
    verify_checkpoint,
    write_slices,
)
from checkpointing.format.slices import SliceTable
from checkpointing.retention.retire import sweep_uncommitted
from checkpointing.stores.local import LocalStore

KEYS = Keys()


def write(store: LocalStore, name: str, step: int, *, rank: int, generation: int = 0) -> Receipt:
    part = TensorSlice(name, (4,), "int64", (0,), (4,))
    return write_slices(
        store,
        KEYS,
        rank=rank,
        step=step,
        generation=generation,
        attempt=0,
        slices=[(part, torch.arange(4) + step)],
    )


def publish(
    store: LocalStore, step: int, *, unchanged: Manifest | None = None, generation: int = 0
) -> Manifest:
    """A checkpoint of a trained and a frozen tensor; `unchanged` already has the frozen one."""
    receipts = [write(store, "trained", step, rank=0, generation=generation)]
    if unchanged is None:
        frozen = write(store, "frozen", step, rank=1, generation=generation)
    else:
        frozen = refer(unchanged, step)
    return commit(
        store,
        KEYS,
        step=step,
        generation=generation,
        receipts=[*receipts, frozen],
        training_state={},
        versions={},
    )


def refer(manifest: Manifest, step: int) -> Receipt:
    parts = manifest.parts_of("frozen")
    frozen = {"frozen": manifest.tensors["frozen"]}
    segments = tuple({part.segment: manifest.segments[part.segment] for part in parts}.values())
    return Receipt(
        rank=1,
        step=step,
        generation=0,
        attempt=0,
        slices=SliceTable.of(parts, frozen, [segment.key for segment in segments]),
        segments=segments,
    )


def sound(store: LocalStore, step: int) -> bool:
    return verify_checkpoint(store, KEYS, step, threads=1).findings == ()


def retired(
    store: LocalStore, keep_last: int, keep_every: int | None = None, *, up_to_step: int = 10**6
) -> list[int]:
    surveyor = Surveyor(store=store, keys=KEYS)
    return retire(surveyor, keep_last=keep_last, keep_every=keep_every, up_to_step=up_to_step)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_segment_lives_as_long_as_somebody_refers_to_it(store: LocalStore) -> None:
    first = publish(store, 10)
    publish(store, 20, unchanged=first)
    (frozen,) = {part.segment for part in first.parts_of("frozen")}
    delete_checkpoint(store, KEYS, 10)
    assert list_steps(store, KEYS) == [20]
    assert [key for key in store.list("d/") if "000000000010" in key] == [frozen]
    assert sweep_uncommitted(Surveyor(store=store, keys=KEYS), 10**6) == []
    assert sweep_orphans(Surveyor(store=store, keys=KEYS), 1) == []
    assert sound(store, 20)
    publish(store, 30)
    delete_checkpoint(store, KEYS, 20)
    assert all("000000000030" in key for key in store.list("d/"))
    assert sound(store, 30)


def test_what_cannot_be_read_guards_what_it_may_refer_to(store: LocalStore) -> None:
    first = publish(store, 10)
    publish(store, 20, unchanged=first)
    publish(store, 30)
    record = store.get(KEYS.commit(20))
    store.put(KEYS.commit(20), [record.replace(b'"schema":3', b'"schema":9')])
    delete_checkpoint(store, KEYS, 10)
    store.put(KEYS.commit(20), [record])
    assert sound(store, 20)


def test_newest_that_can_be_read_stays_behind_damaged_ones() -> None:
    assert plan_retention([10, 20, 30], 1, None, (), unreadable={30}) == [10]
    assert plan_retention([10, 20, 30], 2, None, (), unreadable={20}) == []
    assert plan_retention([10, 20], 1, None, (), unreadable={10, 20}) == []
    assert plan_retention([10, 20, 30], 1, None, (), verified={10, 20}) == [10]


def test_delete_refuses_the_newest_of_its_kind(store: LocalStore) -> None:
    for step in (10, 20, 30, 40):
        publish(store, step)
    store.put(KEYS.commit(40), [b"{"])
    note_verified(store, KEYS, load_manifest(store, KEYS, 10))
    note_verified(store, KEYS, load_manifest(store, KEYS, 20))
    with pytest.raises(ProtectedError, match=r"step 30 .* newest checkpoint that can be read"):
        delete_checkpoint(store, KEYS, 30)
    with pytest.raises(ProtectedError, match=r"step 20 .* newest checkpoint that was verified"):
        delete_checkpoint(store, KEYS, 20)
    delete_checkpoint(store, KEYS, 10)
    delete_checkpoint(store, KEYS, 20, force=True)
    delete_checkpoint(store, KEYS, 40)
    assert list_steps(store, KEYS) == [30]
    assert store.list("m/") == [KEYS.commit(30)]


def test_records_of_later_steps_are_neither_counted_nor_deleted(store: LocalStore) -> None:
    """Those of another run: without them the run keeps what its rules say."""
    for step in (10, 20, 30, 40, 50, 60, 70):
        publish(store, step)
    note_verified(store, KEYS, load_manifest(store, KEYS, 20))
    note_verified(store, KEYS, load_manifest(store, KEYS, 60))
    pin(store, KEYS, 10)
    assert retired(store, 2, up_to_step=50) == [30]
    assert retired(store, 1, keep_every=40, up_to_step=50) == []
    assert retired(store, 1, up_to_step=50) == [40]
    assert list_steps(store, KEYS) == [10, 20, 50, 60, 70]
    assert all(sound(store, step) for step in (10, 20, 50, 60, 70))


def test_a_sweep_leaves_the_segments_of_later_records(store: LocalStore) -> None:
    first = publish(store, 10)
    publish(store, 60, unchanged=first)
    publish(store, 20)
    write(store, "trained", 15, rank=0)
    assert retired(store, 1, up_to_step=20) == [10]
    assert [KEYS.step_of(key) for key in store.list("d/") if "r00001" in key] == [10, 20]
    assert not [key for key in store.list("d/") if KEYS.step_of(key) == 15]
    assert sound(store, 60) and sound(store, 20)


def test_a_foreign_record_guards_what_it_refers_to_until_it_is_deleted(store: LocalStore) -> None:
    first = publish(store, 10)
    record = publish(store, 20, unchanged=first).to_bytes()
    kept = f"{KEYS.commit(20)}.foreign"
    set_foreign_aside(store, KEYS, 20)
    set_foreign_aside(store, KEYS, 20)  # there is none any more
    surveyor = Surveyor(store=store, keys=KEYS)
    for step in (30, 40, 50):
        publish(store, step)
        retire(surveyor, keep_last=1, keep_every=None, up_to_step=step)
    assert sweep_orphans(Surveyor(store=store, keys=KEYS), 1) == []
    assert store.list("m/") == [kept, KEYS.commit(50)]
    store.put(KEYS.commit(20), [record])
    assert sound(store, 20)
    store.delete_many([kept, KEYS.commit(20)])
    assert retired(store, 1) == []
    assert {KEYS.step_of(key) for key in store.list("d/")} == {50}


def test_a_foreign_record_that_cannot_be_read_guards_all_up_to_its_step(store: LocalStore) -> None:
    for step in (10, 20, 30):
        publish(store, step)
    later = store.get(KEYS.commit(20)).replace(b'"schema":3', b'"schema":9')
    store.put(KEYS.commit(20), [later])
    set_foreign_aside(store, KEYS, 20)
    assert retired(store, 1) == [10]
    publish(store, 40)
    assert retired(store, 1) == [30]
    assert {KEYS.step_of(key) for key in store.list("d/")} == {10, 20, 40}
    assert store.get(f"{KEYS.commit(20)}.foreign") == later


def test_a_note_is_about_one_record(store: LocalStore) -> None:
    manifest = publish(store, 10)
    note_verified(store, KEYS, manifest)
    assert verified_at(store, KEYS, manifest.step, manifest.sha256) is not None
    store.delete(KEYS.commit(10))
    assert verified_at(store, KEYS, 10, publish(store, 10, generation=1).sha256) is None
    store.put(KEYS.verified(10), [b"["])
    assert verified_at(store, KEYS, manifest.step, manifest.sha256) is None


def test_pins_hold_until_taken_back(store: LocalStore) -> None:
    for step in (10, 20, 30):
        publish(store, step)
    pin(store, KEYS, 10)
    pin(store, KEYS, 10)
    assert pinned_steps(store, KEYS) == {10}
    assert retired(store, 1) == [20]
    with pytest.raises(ProtectedError, match="pinned"):
        delete_checkpoint(store, KEYS, 10, force=True)
    assert unpin(store, KEYS, 10)
    assert not unpin(store, KEYS, 10)
    assert retired(store, 1) == [10]
    assert store.list("m/") == [KEYS.commit(30)]
    with pytest.raises(NotCommittedError):
        pin(store, KEYS, 10)
    assert pinned_steps(store, KEYS) == frozenset()


def test_a_pin_that_a_whole_deletion_overtakes(store: LocalStore) -> None:
    class Slow(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            delete_checkpoint(LocalStore(self.root), KEYS, 10)
            return super().put_if_absent(key, data)

    publish(store, 10)
    publish(store, 20)
    with pytest.raises(NotCommittedError):
        pin(Slow(store.root), KEYS, 10)
    assert store.list("m/") == [KEYS.commit(20)]


class PinnedMeanwhile(LocalStore):
    """Somebody pins `step` just before request number `after`."""

    def __init__(self, root: Path, step: int, after: int) -> None:
        super().__init__(root)
        self._step, self._after = step, after
        self.calls, self.answer = 0, list[bool]()

    def _maybe_pin(self) -> None:
        self.calls += 1
        if self.calls == self._after:
            try:
                pin(LocalStore(self.root), KEYS, self._step)
            except NotCommittedError:
                self.answer.append(False)
            else:
                self.answer.append(True)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._maybe_pin()
        return super().put_if_absent(key, data)

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        self._maybe_pin()
        return super().put(key, chunks)

    def delete(self, key: str) -> None:
        self._maybe_pin()
        super().delete(key)

    def get(self, key: str) -> bytes:
        self._maybe_pin()
        return super().get(key)


@pytest.mark.parametrize("after", range(1, 8))
def test_a_pin_in_the_middle_of_a_deletion(store: LocalStore, after: int) -> None:
    """Wherever the pin comes, either it holds and all is there, or it fails and is not there."""
    publish(store, 10)
    publish(store, 20)
    meanwhile = PinnedMeanwhile(store.root, 10, after)
    try:
        delete_checkpoint(meanwhile, KEYS, 10)
        deleted = True
    except ProtectedError:
        deleted = False
    assert len(meanwhile.answer) == 1, f"only {meanwhile.calls} calls"
    assert meanwhile.answer == [not deleted]
    assert list_steps(store, KEYS) == ([20] if deleted else [10, 20])
    assert pinned_steps(store, KEYS) == (frozenset() if deleted else {10})
    assert deleted or sound(store, 10)


@pytest.mark.parametrize("after", range(1, 8))
def test_a_pin_while_the_run_gives_the_checkpoint_up(store: LocalStore, after: int) -> None:
    """Wherever the pin comes, either people find the record, or it fails."""
    publish(store, 10)
    publish(store, 20)
    meanwhile = PinnedMeanwhile(store.root, 20, after)
    give_up(meanwhile, KEYS, 20)
    assert list_steps(store, KEYS) == [10]
    kept = f"{KEYS.commit(20)}.foreign" in store.list("m/")
    assert meanwhile.answer == ([kept] if after <= meanwhile.calls else [])
    if after > meanwhile.calls:
        assert store.list("m/") == [KEYS.commit(10), f"{KEYS.commit(20)}.unreadable"]


def test_a_pinned_one_that_the_run_gave_up_stays(store: LocalStore) -> None:
    """Whatever the rules say; its step is committed again."""
    for step in (10, 20):
        publish(store, step)
    record = store.get(KEYS.commit(20))
    pin(store, KEYS, 20)
    give_up(store, KEYS, 20)
    give_up(store, KEYS, 20)  # the answer to the first call may be lost
    for step in (15, 20, 30, 40):
        publish(store, step, generation=1)
        retired(store, 1)
    unpin(store, KEYS, 20)
    retired(store, 1)
    assert store.list("m/") == [f"{KEYS.commit(20)}.foreign", KEYS.commit(40)]
    store.put(KEYS.commit(20), [record])
    assert sound(store, 20)


def test_a_killed_deletion_is_finished_later(store: LocalStore) -> None:
    """Killed before each of its deletes in turn; what is left is never half a checkpoint."""
    for kill in range(6):
        step = 10 + kill
        publish(store, step)
        publish(store, 100 + kill)

        class Killed(LocalStore):
            left = kill

            def delete(self, key: str) -> None:
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
                super().delete(key)

        try:
            delete_checkpoint(Killed(store.root), KEYS, step)
        except KeyboardInterrupt:
            there = step in list_steps(store, KEYS)
            assert there == (kill == 0)
            assert not there or sound(store, step)
        retired(store, 1)
        retired(store, 1)
        assert all(KEYS.step_of(key) == 100 + kill for key in store.list(""))


def test_orphans_of_earlier_generations_go_at_the_start(store: LocalStore) -> None:
    publish(store, 10)
    for step, generation in ((10, 1), (20, 0), (30, 2), (30, 3)):
        write(store, "trained", step, rank=0, generation=generation)
    store.put("d/notes", [b"not ours"])
    gone = sweep_orphans(Surveyor(store=store, keys=KEYS), 3)
    assert [(KEYS.step_of(key), KEYS.generation_of(key)) for key in gone] == [
        (10, 1),
        (20, 0),
        (30, 2),
    ]
    assert sound(store, 10)
    left = {KEYS.generation_of(key) for key in store.list("d/") if KEYS.step_of(key) == 30}
    assert left == {3}
    assert store.get("d/notes") == b"not ours"


def test_orphans_that_a_damaged_record_may_refer_to_stay(store: LocalStore) -> None:
    publish(store, 10)
    write(store, "trained", 20, rank=0)
    write(store, "trained", 30, rank=0)
    store.put(f"{KEYS.commit(20)}.unreadable", [b"{"])
    assert [KEYS.step_of(key) for key in sweep_orphans(Surveyor(store=store, keys=KEYS), 5)] == [30]


@dataclass
class History:
    """What a store should look like, kept in sets alone."""

    refers: dict[int, frozenset[str]] = field(default_factory=dict)
    pins: set[int] = field(default_factory=set)
    notes: set[int] = field(default_factory=set)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "full", "pin", "unpin", "verify", "retire", "delete"]),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(1, 3), st.none() | st.integers(2, 4))
def test_no_history_loses_what_is_needed(
    actions: list[tuple[str, int]], keep_last: int, keep_every: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, model, step = LocalStore(folder), History(), 0
        surveyor = Surveyor(store=store, keys=KEYS)
        for action, number in actions:
            steps = sorted(model.refers)
            chosen = steps[number % len(steps)] if steps else None
            if action in ("save", "full"):
                step += 1
                last = newest(store, KEYS) if action == "save" else None
                model.refers[step] = frozenset(publish(store, step, unchanged=last).segments)
            elif chosen is None:
                continue
            elif action == "pin":
                pin(store, KEYS, chosen)
                model.pins.add(chosen)
            elif action == "unpin":
                unpin(store, KEYS, chosen)
                model.pins.discard(chosen)
            elif action == "verify":
                note_verified(store, KEYS, load_manifest(store, KEYS, chosen))
                model.notes.add(chosen)
            elif action == "delete":
                protected = {steps[-1], *model.pins, *sorted(model.notes)[-1:]}
                try:
                    delete_checkpoint(store, KEYS, chosen)
                    assert chosen not in protected
                    forget(model, [chosen])
                except ProtectedError:
                    assert chosen in protected
            else:
                kept = {*steps[-keep_last:], *model.pins, *sorted(model.notes)[-1:]}
                kept |= {s for s in steps if keep_every and s % keep_every == 0}
                gone = retire(
                    surveyor, keep_last=keep_last, keep_every=keep_every, up_to_step=10**6
                )
                assert gone == [s for s in steps if s not in kept]
                forget(model, gone)
            assert list_steps(store, KEYS) == sorted(model.refers)
            assert set(store.list("d/")) == frozenset().union(*model.refers.values())
        assert all(sound(store, step) for step in model.refers)


def forget(model: History, steps: list[int]) -> None:
    for step in steps:
        del model.refers[step]
        model.notes.discard(step)


def segment_keys() -> Iterator[str]:
    for step in range(6):
        for index in range(3):
            yield KEYS.segment(rank=0, step=step, generation=0, attempt=0, index=index)


@given(
    st.sets(st.sampled_from(list(segment_keys()))),
    st.dictionaries(st.integers(0, 5), st.frozensets(st.sampled_from(list(segment_keys())))),
    st.frozensets(st.integers(0, 5)),
)
def test_no_plan_takes_a_referenced_segment(
    gone: set[str], refers: dict[int, frozenset[str]], unreadable: frozenset[int]
) -> None:
    # No record that can be read refers to a segment of a later step.
    refers = {
        step: frozenset(key for key in named if (KEYS.step_of(key) or 0) <= step)
        for step, named in refers.items()
    }
    rest = Survey(segments=refers, unreadable=unreadable)
    plan = set(plan_segments(gone, rest, KEYS))
    kept = gone - plan
    assert plan <= gone
    for key in plan:
        assert all(key not in keys for keys in refers.values())
        assert all(s < (KEYS.step_of(key) or 0) for s in unreadable)
    for key in kept:
        referred = any(key in keys for keys in refers.values())
        assert referred or any(s >= (KEYS.step_of(key) or 0) for s in unreadable)
