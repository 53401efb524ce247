"""A save survives the worker that made the copy, and a killed uploader leaves no trace of one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import (
    Attempt,
    Box,
    Keys,
    Reader,
    Receipt,
    Surveyor,
    TensorSlice,
    commit,
    newest,
    open_store,
    sweep_orphans,
    write_shared,
)
from checkpointing.stores.local import LocalStore
from elastic.node.uploader import write_part
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.saves import Upload
from tests.support import ROOT
from trainer.engine.host_copy import HostBuffer, Share
from trainer.engine.shared_copy import CopyGoneError, open_copy
from trainer.replication.step_commit import Place

STEP, DEADLINE_S = 8, 60.0
CPU = torch.device("cpu")
SHAPES = {"param/w": (64, 33), "param/scalar": (), "param/empty": (0, 4), "exp_avg/w": (64, 33)}


def state(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def slices() -> tuple[TensorSlice, ...]:
    return tuple(
        TensorSlice(name, shape, "float32", (0,) * len(shape), shape)
        for name, shape in SHAPES.items()
    )


def share(seed: int) -> Share:
    return Share(list(zip(slices(), state(seed).values(), strict=True)))


class Child:
    """A process that does something, tells of it, and waits to be killed."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self.said, said = multiprocessing.Pipe(duplex=False)
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=work, args=(said, *args), daemon=True)
        self.process.start()

    def hear(self) -> Any:
        assert self.said.poll(DEADLINE_S)
        return self.said.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def copy(said: Connection, seed: int) -> None:
    """The worker."""
    mine = share(seed)
    buffer = HostBuffer(mine.size_bytes, CPU)
    buffer.copy(mine).wait()
    said.send((os.getpid(), buffer.fd, buffer.number))
    signal.pause()


class StuckStore(LocalStore):
    """Stops after the first chunk of an object, for good."""

    said: Connection

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        def stuck() -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                yield chunk
                self.said.send("writing")
                signal.pause()

        return super().put(key, stuck())


def write_forever(said: Connection, where: tuple[int, int, int], root: Path) -> None:
    """The uploader."""
    store = StuckStore(root)
    store.said = said
    attempt = Attempt(rank=0, step=STEP, generation=1)
    with open_copy(*where) as memory:
        write_shared(store, Keys(), attempt, slices(), memory)


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def run(work: Callable[..., None], *args: Any) -> Child:
        children.append(Child(work, *args))
        return children[-1]

    yield run
    for child in children:
        child.kill()


Start = Callable[..., Child]


def write(memory: memoryview, root: Path, step: int) -> Receipt:
    attempt = Attempt(rank=0, step=step, generation=1)
    return write_shared(open_store(root), Keys(), attempt, slices(), memory)


def publish(root: Path, receipt: Receipt) -> None:
    commit(
        open_store(root),
        Keys(),
        step=receipt.step,
        generation=1,
        receipts=[receipt],
        training_state={},
        versions={},
    )


def assert_newest_is(root: Path, step: int, seed: int) -> None:
    store = open_store(root)
    manifest = newest(store, Keys())
    assert manifest is not None and manifest.step == step
    for name, expected in state(seed).items():
        if expected.numel():
            box = Box(name, (0,) * expected.dim(), tuple(expected.shape))
            assert torch.equal(Reader(store, manifest).read_many([box])[0], expected)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_the_worker_is_killed_between_copy_and_receipt(start: Start, tmp_path: Path) -> None:
    before, worker = shared_memory(), start(copy, 5)
    where = worker.hear()
    with open_copy(*where) as memory:
        worker.kill()
        receipt = write(memory, tmp_path, STEP)
    publish(tmp_path, receipt)
    assert_newest_is(tmp_path, STEP, seed=5)
    assert shared_memory() <= before


def test_the_uploader_is_killed_as_it_writes(start: Start, tmp_path: Path) -> None:
    before, worker = shared_memory(), start(copy, 5)
    where = worker.hear()
    with open_copy(*where) as memory:
        publish(tmp_path, write(memory, tmp_path, STEP - 4))
    uploader = start(write_forever, where, tmp_path)
    assert uploader.hear() == "writing"
    uploader.kill()
    left = list((tmp_path / "d").rglob("*.part"))
    assert len(left) == 1, "it was in the middle of it"
    assert_newest_is(tmp_path, STEP - 4, seed=5)
    with open_copy(*where) as memory:  # the worker still has the copy, and asks the next one
        publish(tmp_path, write(memory, tmp_path, STEP))
    assert_newest_is(tmp_path, STEP, seed=5)
    sweep_orphans(Surveyor(store=open_store(tmp_path), keys=Keys()), 2)
    assert not left[0].exists()
    worker.kill()
    assert shared_memory() <= before


def test_a_worker_that_was_gone_before_costs_the_save_and_nothing_else(start: Start) -> None:
    worker = start(copy, 5)
    where = worker.hear()
    worker.kill()
    with pytest.raises(CopyGoneError, match=f"process {where[0]}"), open_copy(*where):
        pass


def test_the_buffer_is_used_again(tmp_path: Path) -> None:
    first, second = share(1), share(2)
    assert first.size_bytes == second.size_bytes
    buffer = HostBuffer(first.size_bytes, CPU)
    pages = os.stat(f"/proc/self/fd/{buffer.fd}")
    for seed, mine in ((1, first), (2, second), (1, first)):
        buffer.copy(mine).wait()
        with open_copy(os.getpid(), buffer.fd, buffer.number) as memory:
            publish(tmp_path / str(seed), write(memory, tmp_path / str(seed), STEP + seed))
        assert_newest_is(tmp_path / str(seed), STEP + seed, seed)
    after = os.stat(f"/proc/self/fd/{buffer.fd}")
    assert (after.st_ino, after.st_blocks) == (pages.st_ino, pages.st_blocks), "no new memory"
    buffer.close()


def test_parts_of_tensors_are_copied_from_views(tmp_path: Path) -> None:
    """Rows from the middle of a tensor that goes on changing after the copy."""
    live = state(3)["param/w"]
    (whole, *_) = slices()
    part = type(whole)(whole.name, whole.global_shape, whole.dtype, (10, 0), (5, 33))
    mine = Share([(part, live[10:15])])
    buffer, expected = HostBuffer(mine.size_bytes, live.device), live[10:15].clone()
    buffer.copy(mine).wait()
    live.zero_()
    with open_copy(os.getpid(), buffer.fd, buffer.number) as memory:
        assert bytes(memory[: expected.nbytes]) == expected.numpy().tobytes()
    buffer.close()


def test_a_buffer_that_was_used_again_is_not_taken_for_the_copy(tmp_path: Path) -> None:
    """The worker took the uploader for dead, and it was not."""
    first, second = share(1), share(2)
    buffer = HostBuffer(first.size_bytes, CPU)
    buffer.copy(first).wait()
    late = os.getpid(), buffer.fd, buffer.number
    with pytest.raises(CopyGoneError, match="in the place of copy"), open_copy(*late) as memory:
        write(memory, tmp_path, STEP)
        buffer.copy(second).wait()
    with pytest.raises(CopyGoneError, match="in the place of copy"), open_copy(*late):
        raise AssertionError("not even begun")
    buffer.close()


@pytest.mark.parametrize("place", ["store", "memory"])
def test_a_part_written_again_from_a_buffer_used_again_does_not_replace_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's connection broke, and it gave up while the uploader was at it once more."""
    monkeypatch.setattr("checkpointing.snapshots.host_memory.TMPFS", tmp_path)
    paths = RunPaths(root=tmp_path / "run")
    first, second = share(1), share(2)
    buffer = HostBuffer(first.size_bytes, CPU)
    buffer.copy(first).wait()
    upload = Upload(
        place=place,
        pid=os.getpid(),
        fd=buffer.fd,
        number=buffer.number,
        attempt=Attempt(rank=0, step=STEP, generation=1),
        writers=1,
        slices=slices(),
        training_state={},
        begun_at=0.0,
    )
    written = write_part(upload, paths, "node", 1 << 20)
    (segment,) = written.receipt.segments
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    before, puts, put = path.read_bytes(), [], LocalStore.put
    assert len(before) == segment.size_bytes

    def put_late(self: LocalStore, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        def late() -> Iterator[bytes | memoryview]:
            for number, chunk in enumerate(chunks):
                if number == 1:  # the header has been written
                    buffer.copy(second).wait()
                    puts.append(key)
                yield chunk

        return put(self, key, late())

    monkeypatch.setattr(LocalStore, "put", put_late)
    with pytest.raises(CopyGoneError, match="in the place of copy"):
        write_part(upload, paths, "node", 1 << 20)
    assert puts == [segment.key]
    assert path.read_bytes() == before
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [path]
    buffer.close()


def test_the_uploader_imports_no_torch() -> None:
    code = "import sys, elastic.coordinator.uploaders; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"
