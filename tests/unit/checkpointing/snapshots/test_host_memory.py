from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from checkpointing import (
    Keys,
    Manifest,
    Reader,
    StoreUnavailableError,
    TensorSlice,
    build_manifest,
    clear_memory,
    hold_room,
    memory_folder,
    open_memory,
    settle_snapshot,
    sweep_given_up,
    sweep_snapshots,
    take_stock,
    write_slices,
)
from checkpointing.snapshots import host_memory
from checkpointing.stores.local import LocalStore

NODE, OTHER = "node-a", "node-b"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The memory folder of a run of this test alone."""
    folder = memory_folder(tmp_path / "run")
    yield folder
    clear_memory(folder)


def write(store: LocalStore, step: int, generation: int = 1) -> Manifest:
    value = torch.arange(8, dtype=torch.float32) + step
    part = TensorSlice("w", (8,), "float32", (0,), (8,))
    receipt = write_slices(
        store, Keys(), rank=0, step=step, generation=generation, attempt=0, slices=[(part, value)]
    )
    return build_manifest(
        step=step, generation=generation, receipts=[receipt], training_state={}, versions={}
    )


def test_runs_have_folders_of_their_own_that_only_their_user_can_open(
    tmp_path: Path, folder: Path
) -> None:
    assert folder != memory_folder(tmp_path / "run2")
    assert folder.is_relative_to("/dev/shm")
    store = open_memory(folder, NODE)
    modes = [stat.S_IMODE(d.stat().st_mode) for d in (folder.parent, folder, store.root)]
    assert modes == [0o700] * 3


def test_a_folder_open_to_others_is_not_used(folder: Path) -> None:
    open_memory(folder, NODE)
    folder.chmod(0o755)
    with pytest.raises(StoreUnavailableError, match="alone"):
        open_memory(folder, NODE)


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path, folder: Path) -> None:
    open_memory(folder, NODE)
    shutil.rmtree(folder / NODE)
    (folder / NODE).symlink_to(tmp_path)
    with pytest.raises(StoreUnavailableError, match="alone"):
        open_memory(folder, NODE)


def test_without_tmpfs_the_error_names_the_knob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "TMPFS", tmp_path / "absent")
    with pytest.raises(StoreUnavailableError, match="memory_every"):
        open_memory(memory_folder(tmp_path / "run"), NODE)


def test_a_tenth_of_tmpfs_stays_free(folder: Path) -> None:
    store = open_memory(folder, NODE)
    space = os.statvfs(folder)
    with hold_room(store, 1):
        pass
    too_much = hold_room(store, int(0.95 * space.f_blocks * space.f_frsize))
    with pytest.raises(StoreUnavailableError, match="less than 10%"), too_much:
        pass


def test_what_other_runs_have_left_is_named(tmp_path: Path, folder: Path) -> None:
    """A run that failed leaves its snapshots, which no other one deletes."""
    failed = memory_folder(tmp_path / "failed")
    store = open_memory(folder, NODE)
    space = os.statvfs(folder)
    too_much = int(0.95 * space.f_blocks * space.f_frsize)
    try:
        open_memory(failed, NODE).put("d/x", [bytes(3_000_000)])
        with pytest.raises(StoreUnavailableError) as full, hold_room(store, too_much):
            pass
    finally:
        clear_memory(failed)
    assert failed.name.startswith("failed-")
    assert "what runs have left that are over" in str(full.value)
    assert f"{failed} (3 MB)" in str(full.value)
    assert str(folder) + " (" not in str(full.value)


def most_of_what_is_free(folder: Path) -> int:
    """There is room for one that needs so many bytes."""
    space = os.statvfs(folder)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return int(0.7 * (free - host_memory.LEAVE_FREE * total))


def test_writers_count_what_others_are_about_to_write(folder: Path) -> None:
    """They begin together: what one will take is not taken yet when the next one looks."""
    store = open_memory(folder, NODE)
    share = most_of_what_is_free(folder)
    with hold_room(store, share) as first:
        second = hold_room(store, share)
        with pytest.raises(StoreUnavailableError, match="what is being written there"), second:
            pass
        chunk = bytes(1 << 20)
        first.put("d/x", [chunk, chunk])
        assert first.left_bytes == share - (2 << 20)
        assert store.size("d/x") == 2 << 20
        (note,) = store.root.glob("room-*")
        assert host_memory._left_bytes(note) == first.left_bytes, "others are told"
    with hold_room(store, share):
        pass
    assert store.list("") == ["d/x"]


def hold_and_wait(said: Connection, folder: Path, needed_bytes: int) -> None:
    """The node's other process."""
    with hold_room(open_memory(folder, NODE), needed_bytes):
        said.send("held")
        signal.pause()


def test_the_processes_of_a_node_count_each_other_and_no_dead_one(folder: Path) -> None:
    """One writes the node's own parts, one the copies of another node's."""
    store = open_memory(folder, NODE)
    share = most_of_what_is_free(folder)
    context = multiprocessing.get_context("fork")
    said, says = context.Pipe(duplex=False)
    other = context.Process(target=hold_and_wait, args=(says, folder, share), daemon=True)
    other.start()
    try:
        assert said.poll(60.0) and said.recv() == "held"
        beside = hold_room(store, share)
        with pytest.raises(StoreUnavailableError, match="what is being written there"), beside:
            pass
    finally:
        other.kill()
        other.join()
    with hold_room(store, share):
        pass
    assert store.list("") == [], "what the killed one noted is gone"


def test_a_new_snapshot_replaces_the_one_before(folder: Path) -> None:
    store = open_memory(folder, NODE)
    settle_snapshot(store, write(store, 2))
    write(store, 3)  # parts of one that never became whole
    four = write(store, 4)
    later = write(store, 6)  # one that is being written
    settle_snapshot(store, four)
    assert set(store.list("")) == {Keys().commit(4), *four.segments, *later.segments}
    assert Reader(store, four).read_full("w").tolist() == [float(4 + i) for i in range(8)]


def test_a_step_that_is_done_again_replaces_its_old_record(folder: Path) -> None:
    store = open_memory(folder, NODE)
    settle_snapshot(store, write(store, 4, generation=1))
    again = write(store, 4, generation=2)
    settle_snapshot(store, again)
    assert take_stock(folder, {NODE}, NODE).manifests == (again,)


def test_sweeping_spares_only_what_it_is_told_to(folder: Path) -> None:
    store = open_memory(folder, NODE)
    two = write(store, 2)
    settle_snapshot(store, two)
    write(store, 4)
    sweep_snapshots(store, 4, 1, two)
    assert set(store.list("")) == {Keys().commit(2), *two.segments}
    sweep_snapshots(store, 2, 1, None)
    assert store.list("") == []


def test_a_late_sweep_spares_what_the_run_does_again(folder: Path) -> None:
    """The run went back to step 2, and is at 4 once more when its old generation sweeps 5."""
    store = open_memory(folder, NODE)
    two = write(store, 2)
    settle_snapshot(store, two)
    write(store, 5)
    again = write(store, 4, generation=2)
    sweep_snapshots(store, 5, 1, two)
    assert set(store.list("")) == {Keys().commit(2), *two.segments, *again.segments}


def test_what_the_run_went_back_for_makes_room(folder: Path) -> None:
    store = open_memory(folder, NODE)
    kept = [write(store, 4, generation=1), write(store, 6, generation=2)]
    given_up = write(store, 8, generation=1)
    for manifest in (*kept, given_up):
        store.put(Keys().commit(manifest.step), [manifest.to_bytes()])
    write(store, 6, generation=1)  # of a step that was done again already
    write(store, 9, generation=1)  # parts of one that never became whole
    sweep_given_up(store, 4, generation=2)
    whole = [{Keys().commit(manifest.step), *manifest.segments} for manifest in kept]
    assert set(store.list("")) == set.union(*whole)


def test_stock_is_what_can_be_read(folder: Path) -> None:
    assert take_stock(folder, {NODE}, NODE).manifests == ()
    assert not folder.exists(), "looking leaves nothing"
    store = open_memory(folder, NODE)
    two = write(store, 2)
    settle_snapshot(store, two)
    store.put(Keys().commit(9), [b"not a manifest"])
    found = take_stock(folder, {NODE}, NODE)
    assert found.manifests == (two,)
    assert all(found.has(s.key, s.size_bytes) for s in two.segments.values())
    assert not found.has("d/nowhere", 1)


def test_stock_is_taken_while_others_write_and_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing and the look at the sizes one segment is finished, and one deleted."""
    store = open_memory(folder, NODE)
    two, four = write(store, 2), write(store, 4)
    settle_snapshot(store, two)
    segment = store.root / Keys().segment(rank=1, step=6, generation=1, attempt=0, index=0)
    part = segment.with_name(f"{segment.name}.0f.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"a segment")
    (gone,), list_all = four.segments, LocalStore.list

    def list_then_change(self: LocalStore, prefix: str) -> list[str]:
        found = list_all(self, prefix)
        if prefix == Keys().data:
            assert gone in found
            part.replace(segment)
            store.delete(gone)
        return found

    monkeypatch.setattr(LocalStore, "list", list_then_change)
    found = take_stock(folder, {NODE}, NODE)
    assert segment.exists() and not (store.root / gone).exists()
    assert found.manifests == (two,)
    assert set(found.sizes) == set(two.segments)


def test_a_node_that_starts_again_takes_over_its_memory(folder: Path) -> None:
    before, neighbour = open_memory(folder, "node-before"), open_memory(folder, OTHER)
    two = write(before, 2)
    settle_snapshot(before, two)
    four = write(neighbour, 4)
    found = take_stock(folder, {NODE, OTHER}, NODE)
    assert found.manifests == (two,) and set(found.sizes) == set(two.segments)
    assert not before.root.exists()
    assert set(neighbour.list("")) == set(four.segments), "a live node keeps its own"
    reader = Reader(open_memory(folder, NODE), two)
    assert reader.read_full("w").tolist() == [float(2 + i) for i in range(8)]


def test_what_a_node_has_itself_is_not_replaced_by_what_an_earlier_one_left(folder: Path) -> None:
    """The run goes on: it may have done the step again since."""
    for name, generation in (("before", 1), (NODE, 2)):
        store = open_memory(folder, name)
        settle_snapshot(store, write(store, 4, generation))
        os.utime(store.root / Keys().commit(4), (generation, generation))
    (kept,) = take_stock(folder, {NODE}, NODE).manifests
    assert kept.generation == 2


def test_of_two_former_nodes_the_later_ones_record_stays(folder: Path) -> None:
    for age, (name, generation) in enumerate((("x", 1), ("w", 2))):
        store = open_memory(folder, name)
        settle_snapshot(store, write(store, 4, generation))
        os.utime(store.root, (age, age))
    (kept,) = take_stock(folder, {NODE}, NODE).manifests
    assert kept.generation == 2
