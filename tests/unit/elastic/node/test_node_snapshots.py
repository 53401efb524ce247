"""What the coordinator knows of snapshots when nodes come and go; without Ray: no holder is
started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from checkpointing import (
    Attempt,
    Receipt,
    Snapshot,
    TensorSlice,
    clear_memory,
    load_manifest,
    open_memory,
    open_store,
    write_shared,
)
from elastic.coordinator.snapshots import Snapshots
from elastic.membership.progress import Progress
from elastic.node.snapshot_holder import SnapshotHolder
from elastic.protocol import events
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from tests.support.tiny_checkpoint import KEYS, write_state

STEP = 6


class InThisProcess:
    """A node's holder, called without Ray."""

    def __init__(self, folder: Path, node: str) -> None:
        self._holder = SnapshotHolder(Remote(None), folder, node)

    def send(self, method: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(method(self._holder, *args))
        return done


def test_a_run_that_goes_back_has_all_nodes_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.node.snapshot_holder.announce", lambda *_: None)
    paths = RunPaths(root=tmp_path)
    start: Any = partial(InThisProcess, paths.memory)
    known = Snapshots(
        paths, Progress(), start, lambda event: None, versions={}, found=None, timeout_s=1.0
    )
    try:
        for node in ("a", "b"):
            known.node_joined(node)
            for step in (STEP, STEP + 4):
                store = open_memory(paths.memory, node)
                write_state(store, {"w": torch.ones(2)}, step=step, generation=1)
        asyncio.run(known.sweep_given_up(STEP, generation=2))
        for node in ("a", "b"):
            store = open_memory(paths.memory, node)
            assert {KEYS.step_of(key) for key in store.list("")} == {STEP}
    finally:
        clear_memory(paths.memory)


@pytest.mark.parametrize("known_later", [False, True])
def test_what_the_machines_former_node_has_left_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_later: bool
) -> None:
    """Its raylet was started anew, under another id; Ray may still take the old one for alive. The
    memory of another node of the machine is its own."""
    live = ["b", "now", *(["before"] if known_later else [])]
    monkeypatch.setattr("elastic.node.snapshot_holder.announce", lambda *_: None)
    monkeypatch.setattr("elastic.node.snapshot_holder.live_nodes", lambda: live)
    folder = RunPaths(root=tmp_path).memory
    try:
        for node in ("before", "b"):
            store = open_memory(folder, node)
            write_state(store, {"w": torch.ones(2)}, step=STEP, generation=1)
        holder = SnapshotHolder(Remote(None), folder, "now")
        assert (folder / "before").exists() is known_later
        live = ["b", "now"]
        holder.sweep(STEP + 2, 1, None)
        assert sorted(path.name for path in folder.iterdir()) == ["b", "now"]
        assert open_memory(folder, "now").list("") == [] != open_memory(folder, "b").list("")
    finally:
        clear_memory(folder)


def test_a_snapshot_that_no_worker_has_room_for_is_told_of_once(tmp_path: Path) -> None:
    """Machines are alike: where it is short of room, all say so."""
    happened: list[events.Event] = []
    swept: list[int] = []

    class Holder:
        def send(
            self, method: Callable[..., Any], step: int, generation: int, keep: None
        ) -> asyncio.Future[Any]:
            swept.append(step)
            return asyncio.ensure_future(asyncio.sleep(0))

    def start(node: str) -> Any:
        return Holder()

    known = Snapshots(
        RunPaths(root=tmp_path),
        Progress(),
        start,
        happened.append,
        versions={},
        found=None,
        timeout_s=1.0,
    )
    for number in range(10):
        known.node_joined(f"node {number}")

    async def play() -> None:
        await asyncio.gather(*(known.skipped(STEP, 1, "no room") for _ in range(50)))
        # The first one's call has begun when the others come: the second is for all of them.
        assert (len(happened), swept) == (1, [STEP] * 20)
        await known.skipped(STEP, 1, "nor here, later")  # and it may have left a part
        assert (len(happened), swept) == (1, [STEP] * 30)

    asyncio.run(play())


def test_a_late_word_of_a_void_snapshot_costs_no_other(tmp_path: Path) -> None:
    """Its worker is gone, and the run went back: a newer one is being written, at an earlier
    step. Without what is swept it would count as whole, and replace the last good one."""
    happened: list[events.Event] = []
    asked: list[str] = []

    class Holder:
        def send(self, method: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
            asked.append(method.__name__)
            return asyncio.ensure_future(asyncio.sleep(0))

    def start(node: str) -> Any:
        return Holder()

    progress = Progress(generation=3)
    known = Snapshots(
        RunPaths(root=tmp_path),
        progress,
        start,
        happened.append,
        versions={},
        found=None,
        timeout_s=1.0,
    )
    known.node_joined("a")
    progress.begin(STEP, back=True)
    known.went_back(STEP, progress.generation)

    asyncio.run(known.skipped(STEP + 9, 3, "no room, told too late"))
    assert (happened, asked) == ([], [])
    asyncio.run(known.skipped(STEP + 2, 4, "no room"))
    assert (len(happened), asked) == (1, ["sweep"])


def test_a_late_word_of_an_unreadable_snapshot_costs_not_the_one_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went back beyond it, and is at that step once more. What the present roster's workers
    say counts, however many say it and repeat it."""
    monkeypatch.setattr("elastic.node.snapshot_holder.announce", lambda *_: None)
    happened: list[events.Event] = []
    paths, generation = RunPaths(root=tmp_path), 4
    start: Any = partial(InThisProcess, paths.memory)
    try:
        store = open_memory(paths.memory, "a")
        write_state(store, {"w": torch.ones(2)}, step=STEP, generation=generation)
        manifest = load_manifest(store, KEYS, STEP)
        places = dict.fromkeys(manifest.segments, frozenset({"a"}))
        progress = Progress(generation=generation)
        known = Snapshots(
            paths,
            progress,
            start,
            happened.append,
            versions={},
            found=Snapshot(manifest=manifest, places=places),
            timeout_s=1.0,
        )
        asyncio.run(known.failed(STEP, generation - 1, "its CRC32 differed twice"))
        assert progress.snapshot_step == STEP and store.list("") and not happened
        for _ in range(3):
            asyncio.run(known.failed(STEP, generation, "its CRC32 differed twice"))
        assert progress.snapshot_step == 0 and not store.list("")
        assert [type(event) for event in happened] == [events.SnapshotFailed]
    finally:
        clear_memory(paths.memory)


def test_a_skipped_snapshot_takes_no_part_of_the_one_before_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is ahead of the other, and short of room: what it wrote before is swept, too."""
    monkeypatch.setattr("elastic.node.snapshot_holder.announce", lambda *_: None)
    happened: list[events.Event] = []
    paths = RunPaths(root=tmp_path)
    start: Any = partial(InThisProcess, paths.memory)
    known = Snapshots(
        paths, Progress(), start, happened.append, versions={}, found=None, timeout_s=1.0
    )

    def part(node: str, rank: int) -> Receipt:
        row = TensorSlice("w", (2, 4), "uint8", (rank, 0), (1, 4))
        attempt = Attempt(rank=rank, step=STEP, generation=1)
        return write_shared(
            open_memory(paths.memory, node), KEYS, attempt, [row], memoryview(bytes(64))
        )

    async def play() -> None:
        known.node_joined("a")
        await known.take(part("a", 0), {}, "a", 0.0, 2)
        await known.skipped(STEP + 2, 1, "no room")
        await known.take(part("a", 1), {}, "a", 0.0, 2)

    try:
        asyncio.run(play())
    finally:
        clear_memory(paths.memory)
    assert [type(event) for event in happened] == [events.SnapshotSkipped]


def test_nodes_whose_object_store_is_full_cost_no_worker_its_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made again with the next snapshot."""

    def full(value: object) -> None:
        raise ray.exceptions.ObjectStoreFullError

    store = open_store(tmp_path)
    write_state(store, {"w": torch.ones(2)}, step=STEP)
    manifest = load_manifest(store, KEYS, STEP)
    found = Snapshot(manifest=manifest, places=dict.fromkeys(manifest.segments, frozenset({"a"})))
    known = Snapshots(
        RunPaths(root=tmp_path),
        Progress(),
        lambda node: Remote(None),
        lambda event: None,
        versions={},
        found=found,
        timeout_s=1.0,
    )
    monkeypatch.setattr(ray, "put", full)
    asyncio.run(known.skipped(STEP + 4, 1, "no room"))


def test_a_node_that_is_written_off_and_comes_back_has_its_snapshot(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_state(store, {"w": torch.ones(2)}, step=STEP)
    manifest = load_manifest(store, KEYS, STEP)
    found = Snapshot(manifest=manifest, places=dict.fromkeys(manifest.segments, frozenset({"a"})))
    told = Progress()
    known = Snapshots(
        RunPaths(root=tmp_path),
        told,
        lambda node: Remote(None),
        lambda event: None,
        versions={},
        found=found,
        timeout_s=1.0,
    )
    assert told.snapshot_step == STEP
    known.node_lost("a")
    assert told.snapshot_step == 0
    known.node_joined("b")
    assert told.snapshot_step == 0
    known.node_joined("a")
    assert told.snapshot_step == STEP
