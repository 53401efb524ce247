"""What is as it was in the newest committed checkpoint is not written again, and never lost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import (
    Attempt,
    CorruptError,
    Keys,
    KnownPart,
    Manifest,
    NotCommittedError,
    Reader,
    Receipt,
    Surveyor,
    TensorSlice,
    Written,
    commit,
    load_manifest,
    plan_places,
    retire,
    verify_checkpoint,
    write_changed,
    write_shared,
)
from checkpointing.retention.retire import sweep_uncommitted
from checkpointing.stores.local import LocalStore

KEYS = Keys()
State = dict[str, bytes]
Known = Mapping[TensorSlice, KnownPart]


class CountingStore(LocalStore):
    """Knows what was written to it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.puts: dict[str, bytes] = {}

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        data = b"".join(bytes(chunk) for chunk in chunks)
        self.puts[key] = data
        return super().put(key, [data])


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path)


def lay_out(state: State) -> tuple[list[TensorSlice], memoryview]:
    slices = [TensorSlice(n, (len(d),), "uint8", (0,), (len(d),)) for n, d in state.items()]
    places, size = plan_places(slices)
    memory = bytearray(size)
    for place, data in zip(places, state.values(), strict=True):
        memory[place : place + len(data)] = data
    return slices, memoryview(memory)


def write(
    store: LocalStore,
    state: State,
    step: int,
    *,
    known: Known | None = None,
    still: Iterable[str] = (),
    rank: int = 0,
    segment_bytes: int = 1 << 20,
) -> Written:
    slices, memory = lay_out(state)
    return write_changed(
        store,
        KEYS,
        Attempt(rank=rank, step=step, generation=1),
        slices,
        memory,
        known=known or {},
        still=frozenset(still),
        segment_bytes=segment_bytes,
        block_bytes=256,
        piece_bytes=None,
    )


def publish(store: LocalStore, *receipts: Receipt) -> Manifest:
    return commit(
        store,
        KEYS,
        step=receipts[0].step,
        generation=1,
        receipts=receipts,
        training_state={},
        versions={},
    )


def assert_holds(store: LocalStore, step: int, state: State) -> None:
    assert verify_checkpoint(store, KEYS, step, threads=1).findings == ()
    reader = Reader(store, load_manifest(store, KEYS, step), threads=1)
    for name, data in state.items():
        assert reader.read_full(name).numpy().tobytes() == data


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


BASE = {"base": noise(1, 200_000), "head": noise(2, 100_000), "moment": noise(3, 100_000)}


def trained(step: int) -> State:
    """`base` is frozen."""
    return {**BASE, "head": noise(10 + step, 100_000), "moment": noise(20 + step, 100_000)}


def test_a_frozen_tensor_is_written_once(store: CountingStore) -> None:
    first = write(store, trained(1), 1, still=["base"])
    publish(store, first.receipt)
    store.puts.clear()
    second = write(store, trained(2), 2, known=first.parts, still=["base"])
    manifest = publish(store, second.receipt)
    assert 200_000 < sum(map(len, store.puts.values())) < 201_000, "head and moment"
    (base,) = manifest.parts_of("base")
    (old,) = {s for s in first.receipt.segments if s.key == base.segment}
    assert KEYS.step_of(base.segment) == 1 and manifest.segments[base.segment] == old
    assert old.size_bytes < 201_000, "nothing else is kept alive with it"
    surveyor = Surveyor(store=store, keys=KEYS)
    assert retire(surveyor, keep_last=1, keep_every=None, up_to_step=2) == [1]
    assert {KEYS.step_of(key) for key in store.list("d/")} == {1, 2}
    assert len([key for key in store.list("d/") if KEYS.step_of(key) == 1]) == 1
    assert_holds(store, 2, trained(2))


def test_another_tensor_that_stands_still_is_found_out(store: CountingStore) -> None:
    """Trained, but without a change: seen with the second save, referred to from the third on."""
    known: Known = {}
    sizes = []
    for step in (1, 2, 3, 4):
        store.puts.clear()
        written = write(store, trained(step), step, known=known)
        publish(store, written.receipt)
        known = written.parts
        sizes.append(sum(map(len, store.puts.values())) // 100_000)
        assert_holds(store, step, trained(step))
    assert sizes == [4, 4, 2, 2]
    assert {p.name for p, one in known.items() if one.digest is not None} == {"base"}


def test_one_bit_between_the_samples_counts(store: CountingStore) -> None:
    first = write(store, BASE, 1, still=BASE)
    publish(store, first.receipt)
    for at in (5000, 199_999):
        base = bytearray(BASE["base"])
        base[at] ^= 1
        changed = {**BASE, "base": bytes(base)}
        store.puts.clear()
        second = write(store, changed, 2, known=first.parts, still=BASE)
        assert [len(data) // 1000 for data in store.puts.values()] == [200]
    publish(store, second.receipt)
    assert_holds(store, 2, changed)


def test_nothing_at_all_has_changed(store: CountingStore) -> None:
    first = write(store, BASE, 1, still=BASE)
    publish(store, first.receipt)
    store.puts.clear()
    second = write(store, BASE, 2, known=first.parts, still=BASE)
    assert store.puts == {} and second.parts == first.parts
    publish(store, second.receipt)
    assert_holds(store, 2, BASE)


def test_a_repeated_write_is_the_same(store: CountingStore) -> None:
    """An uploader died after it had handed in the receipt, and its successor is asked the same."""
    first = write(store, trained(1), 1, still=["base"])
    publish(store, first.receipt)
    store.puts.clear()
    second = write(store, trained(2), 2, known=first.parts, still=["base"])
    before = dict(store.puts)
    assert write(store, trained(2), 2, known=first.parts, still=["base"]) == second
    assert store.puts == before


def test_slices_that_are_cut_otherwise_are_written(store: CountingStore) -> None:
    first = write(store, BASE, 1, still=BASE)
    publish(store, first.receipt)
    store.puts.clear()
    publish(store, write(store, BASE, 2, known=first.parts, segment_bytes=64_000).receipt)
    assert sum(map(len, store.puts.values())) > 400_000
    assert_holds(store, 2, BASE)


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_an_earlier_segment_that_is_gone_is_written_again(
    store: CountingStore, damage: str
) -> None:
    first = write(store, BASE, 1, still=["base"])
    publish(store, first.receipt)
    key = next(one.place.segment for part, one in first.parts.items() if part.name == "base")
    data = store.get(key)
    store.delete(key)
    if damage == "truncated":
        store.put(key, [data[:-1]])
    publish(store, write(store, BASE, 2, known=first.parts, still=["base"]).receipt)
    assert_holds(store, 2, BASE)


def test_what_was_never_committed_is_not_referred_to(store: CountingStore) -> None:
    publish(store, write(store, BASE, 1).receipt)
    lost = write(store, BASE, 2, still=["base"])
    third = write(store, BASE, 3, known=lost.parts, still=["base"])
    with pytest.raises(NotCommittedError, match=r"writer 0 refers to d/.*step 1.*written whole"):
        publish(store, third.receipt)


def test_only_the_newest_checkpoint_is_referred_to(store: CountingStore) -> None:
    """An earlier one may be deleted at this moment."""
    first = write(store, BASE, 1, still=["base"])
    publish(store, first.receipt)
    second = write(store, BASE, 2)
    third = write(store, BASE, 3, known=first.parts, still=["base"])
    publish(store, second.receipt)
    with pytest.raises(NotCommittedError, match=r"refers to .*/000000000001-1-0/"):
        publish(store, third.receipt)


def test_the_record_of_the_segment_must_be_that_of_the_newest(store: CountingStore) -> None:
    first = write(store, BASE, 1, still=["base"])
    publish(store, first.receipt)
    second = write(store, BASE, 2, known=first.parts, still=["base"]).receipt
    forged = [
        replace(s, crcs=tuple(0 for _ in s.crcs)) if KEYS.step_of(s.key) == 1 else s
        for s in second.segments
    ]
    with pytest.raises(NotCommittedError, match="refers to"):
        publish(store, replace(second, segments=tuple(forged)))


def test_without_anything_known_it_is_write_shared(tmp_path: Path) -> None:
    plain, other = CountingStore(tmp_path / "a"), CountingStore(tmp_path / "b")
    slices, memory = lay_out(BASE)
    attempt = Attempt(rank=0, step=1, generation=1)
    receipt = write_shared(
        plain,
        KEYS,
        attempt,
        slices,
        memory,
        segment_bytes=1 << 20,
        block_bytes=256,
        piece_bytes=None,
    )
    assert write(other, BASE, 1).receipt == receipt
    assert other.puts == plain.puts


@pytest.mark.parametrize(
    "key",
    ["../elsewhere/00000.safetensors", "other/d/5f/r00000/000000000001-1-0/00000.safetensors"],
)
def test_segments_outside_of_the_store_are_refused(store: CountingStore, key: str) -> None:
    manifest = publish(store, write(store, BASE, 1).receipt)
    (segment,) = manifest.segments.values()
    moved = replace(
        manifest,
        segments={key: replace(segment, key=key)},
        slices=replace(manifest.slices, keys=(key,)),
    )
    store.put(KEYS.commit(1), [moved.to_bytes()])
    with pytest.raises(CorruptError, match=r"m/0+1\.json: 1 of its 1 segments are not of this"):
        load_manifest(store, KEYS, 1)


def test_segments_of_a_later_step_are_refused(store: CountingStore) -> None:
    later = publish(store, write(store, BASE, 5).receipt)
    store.put(KEYS.commit(3), [replace(later, step=3).to_bytes()])
    with pytest.raises(CorruptError, match="are of step 3 or before"):
        load_manifest(store, KEYS, 3)


@dataclass
class Writer:
    """One of two workers: what it holds, and what it knows of each of its saves."""

    state: State
    saves: dict[int, Known]


def change(writer: Writer, names: Iterable[int], seed: int) -> None:
    for number in names:
        name = f"t{number}"
        writer.state[name] = noise(seed * 31 + number, len(writer.state[name]))


SAVES = st.lists(
    st.tuples(
        st.sets(st.integers(0, 3)),  # what changes
        st.sampled_from(["commit", "commit", "commit", "lose", "forget"]),
        st.sampled_from(["retire", "retire", "sweep", "nothing"]),
    ),
    min_size=2,
    max_size=10,
)


@settings(max_examples=40, deadline=None)
@given(SAVES, st.integers(1, 3), st.sampled_from([300, 1 << 20]), st.sets(st.integers(0, 3)))
def test_every_history_reads_back(
    saves: list[tuple[set[int], str, str]], keep_last: int, segment_bytes: int, still: set[int]
) -> None:
    """Saver of two writers with random changes, some never committed; retention in between."""
    names = [f"t{number}" for number in range(4)]
    sizes = {name: 100 + 200 * number for number, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(folder)
        surveyor = Surveyor(store=store, keys=KEYS)
        writers = [
            Writer({f"t{n}": noise(rank * 4 + n, sizes[f"t{n}"]) for n in range(4)}, {})
            for rank in range(2)
        ]
        committed, expected = 0, dict[int, list[State]]()
        for step, (changes, fate, after) in enumerate(saves, start=1):
            receipts = []
            for rank, writer in enumerate(writers):
                change(writer, changes, seed=step * 2 + rank)
                if fate == "forget" and rank == 0:
                    writer.saves.clear()  # the worker is a new one
                state = {f"{rank}/{name}": data for name, data in writer.state.items()}
                written = write(
                    store,
                    state,
                    step,
                    known=writer.saves.get(committed, {}),
                    still=[f"{rank}/t{n}" for n in still],
                    rank=rank,
                    segment_bytes=segment_bytes,
                )
                writer.saves[step] = written.parts
                receipts.append(written.receipt)
            if fate == "lose":
                continue
            publish(store, *receipts)
            committed = step
            expected[step] = [dict(writer.state) for writer in writers]
            if after == "retire":
                for gone in retire(surveyor, keep_last=keep_last, keep_every=None, up_to_step=step):
                    del expected[gone]
            elif after == "sweep":
                sweep_uncommitted(Surveyor(store=store, keys=KEYS), step)
        for step, states in expected.items():
            whole = {f"{r}/{n}": d for r, state in enumerate(states) for n, d in state.items()}
            assert_holds(store, step, whole)


def test_elements_of_several_bytes(store: CountingStore) -> None:
    """Parts apart keep the order that aligns them in their file."""
    weights = torch.arange(50, dtype=torch.float32)
    halves = torch.arange(30, dtype=torch.bfloat16)
    state = {"h": halves.view(torch.uint8).numpy().tobytes(), "w": weights.numpy().tobytes()}
    slices = [
        TensorSlice("h", (30,), "bfloat16", (0,), (30,)),
        TensorSlice("w", (50,), "float32", (0,), (50,)),
    ]
    _, memory = lay_out(state)
    written = write_changed(
        store,
        KEYS,
        Attempt(rank=0, step=1, generation=1),
        slices,
        memory,
        known={},
        still={"h", "w"},
    )
    manifest = publish(store, written.receipt)
    reader = Reader(store, manifest)
    assert torch.equal(reader.read_full("w"), weights)
    assert torch.equal(reader.read_full("h"), halves)
    assert manifest.parts_of("w")[0].begin < manifest.parts_of("h")[0].begin
