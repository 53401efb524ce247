"""What the coordinator does about a checkpoint that the workers cannot read."""

from __future__ import annotations

import asyncio
import errno
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import (
    CheckpointConfig,
    CheckpointError,
    CorruptError,
    IncompatibleError,
    MissingError,
    NotCommittedError,
    OtherRecordError,
    Reader,
    Store,
    StoreUnavailableError,
    list_steps,
    load_manifest,
    open_store,
    pin,
)
from elastic.config import HealthConfig
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.restores import Restores
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.save_wish import SaveWish
from elastic.coordinator.workers import Workers
from elastic.exit_status import decide_status_of
from elastic.membership.decisions import GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol import events
from elastic.protocol.messages import Identity
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from tests.support.coordinator_desk import Agents
from tests.support.tiny_checkpoint import KEYS, write_state
from trainer.loop.samples import Ledger
from trainer.parallel.layout import ParallelDims
from trainer.recovery.numbers import numbers_of

GENERATION = 3


@dataclass
class Desk:
    """The coordinator's parts that have to do with it."""

    store: Store
    paths: RunPaths
    membership: Membership
    receipts: Receipts
    workers: Workers
    records: RunLog
    restores: Restores
    agents: Agents

    def worker(self, name: str) -> str:
        """One that has started."""
        self.workers.started[name] = Identity(worker=name, rank=0, node=name.upper(), pid=1)
        return name

    def damage(self, step: int) -> CorruptError:
        """Flips a bit of a checkpoint. Returns what its reader says."""
        manifest = load_manifest(self.store, KEYS, step)
        segment = next(iter(manifest.segments.values()))
        data = bytearray(self.store.get(segment.key))
        data[0] ^= 1
        self.store.put(segment.key, [bytes(data)])
        with pytest.raises(CorruptError) as raised:
            Reader(self.store, manifest).read_full("w")
        return raised.value

    def failed(self) -> list[int]:
        """Steps in the events."""
        return [
            e.step for e in read_events(self.paths.events) if isinstance(e, events.CheckpointFailed)
        ]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Checkpoints of 10 and 20, and the roster that is to restore 20."""
    paths = RunPaths(root=tmp_path)
    store = open_store(paths.checkpoints)
    for step in (10, 20):
        write_state(store, {"w": torch.randn(4, 4)}, step=step)
    groups = GroupConfig(
        max_replicas=1,
        min_replicas=1,
        dims=ParallelDims(),
        lanes=1,
        steps=30,
        start_workers=1,
        max_regroups_without_progress=8,
    )
    config = CoordinatorConfig(
        groups=groups,
        paths=paths,
        identity=RunIdentity(id="r"),
        prefix="run/",
        health=HealthConfig(),
        checkpoint=CheckpointConfig(),
        generation=GENERATION,
        restore_step=20,
        snapshot=None,
        started=events.RunStarted(
            time=0.0, name="r", layout={}, steps=30, start_step=20, versions={}
        ),
        faults=(),
        ledger=Ledger(seed=0, global_batch=1, lanes=1, samples=1),
    )
    membership = Membership(groups, Progress(generation=GENERATION, restore_step=20))
    records = RunLog(config, membership)
    dispatcher = Dispatcher(membership, records, lambda effects: None)
    receipts = Receipts(config, membership, dispatcher, records, SaveWish(membership))
    agents = Agents()
    watches: Any = agents
    nothing: Any = None
    workers = Workers(config, membership, dispatcher, records, watches, nothing, nothing)
    restores = Restores(config, membership, dispatcher, workers, records, receipts)
    dispatcher.ready.set()
    yield Desk(store, paths, membership, receipts, workers, records, restores, agents)
    records.end("interrupted", None).result()


def test_a_damaged_one_is_given_up_once(desk: Desk) -> None:
    error = desk.damage(20)

    async def both_workers_say_so() -> None:
        reports = (desk.restores.failed(name, 20, GENERATION, error) for name in ("a", "b"))
        await asyncio.gather(*reports)
        await desk.restores.failed("a", 10, GENERATION - 1, error)  # of a roster of the past

    assert desk.receipts.saved(20)
    asyncio.run(both_workers_say_so())
    assert (desk.membership.progress.restore_step, desk.membership.stopped) == (10, None)
    assert list_steps(desk.store, KEYS) == [10]
    assert desk.failed() == [20]
    assert not desk.receipts.saved(20), "the step can be committed again"


def test_a_pinned_one_that_is_damaged_is_kept_for_people(desk: Desk) -> None:
    pin(desk.store, KEYS, 20)
    asyncio.run(desk.restores.failed(desk.worker("a"), 20, GENERATION, desk.damage(20)))
    assert desk.failed() == [20] and list_steps(desk.store, KEYS) == [10]
    assert f"{KEYS.commit(20)}.foreign" in desk.store.list("m/")


def test_one_that_is_out_of_reach_is_left_as_it_is(desk: Desk, tmp_path: Path) -> None:
    """From here, too: a file is in the place of its directory."""
    error = StoreUnavailableError("the bucket", None, "access denied")
    there, moved = tmp_path / "checkpoints", tmp_path / "moved"
    there.rename(moved)
    there.touch()
    asyncio.run(desk.restores.failed("a", 20, GENERATION, error))
    there.unlink()
    moved.rename(there)
    assert desk.membership.stopped is not None
    assert "access denied. Nothing was changed" in str(desk.membership.stopped.error)
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == [20]


def test_one_that_does_not_even_refuse_here_is_out_of_reach(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hard mount on the coordinator's machine, and soft ones on the workers'."""
    answers = threading.Event()
    monkeypatch.setattr("elastic.coordinator.restores.look_again", lambda *_: answers.wait())
    monkeypatch.setattr("elastic.coordinator.restores._ANSWER_S", 0.01)
    monkeypatch.setattr("elastic.coordinator.restores._PATIENCE_S", -1.0)
    error = StoreUnavailableError("the mount", errno.ETIMEDOUT, "Connection timed out")

    async def play() -> None:
        try:
            await asyncio.wait_for(desk.restores.failed("a", 20, GENERATION, error), 60)
        finally:
            answers.set()

    asyncio.run(play())
    assert desk.membership.stopped is not None
    assert "Nothing was changed" in str(desk.membership.stopped.error)
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == [20]


AWAY = StoreUnavailableError("s3://bucket/run", None, "no answer [ReadTimeout]", may_pass=True)
REFUSED = StoreUnavailableError("s3://bucket/run", None, "access denied [AccessDenied]")


@pytest.mark.parametrize("told", [AWAY, REFUSED], ids=["away", "refused"])
@pytest.mark.parametrize("seen", [AWAY, REFUSED], ids=["away here", "refused here"])
def test_a_store_that_is_away_for_all_is_tried_again_for_some_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, told: CheckpointError, seen: CheckpointError
) -> None:
    """By the next roster; one that refuses is not. Each worker of a roster says so."""
    looks = list[int]()

    def look(*_: Any) -> None:
        looks.append(desk.membership.progress.generation)
        raise seen

    monkeypatch.setattr("elastic.coordinator.restores.look_again", look)
    monkeypatch.setattr("elastic.coordinator.restores._ANSWER_S", 0.05)
    monkeypatch.setattr("elastic.coordinator.restores._LOOK_S", 0.01)
    progress = desk.membership.progress

    async def roster() -> None:
        copied = pickle.loads(pickle.dumps(told))  # as Ray's call has it
        reports = (desk.restores.failed(w, 20, progress.generation, copied) for w in ("a", "b"))
        await asyncio.gather(*reports)
        progress.interrupted(20)  # all join, and the next roster tries again
        progress.begin(20, back=True)

    async def play() -> None:
        for _ in range(3):
            await roster()
        assert (desk.membership.stopped is None) == (told is seen is AWAY)
        monkeypatch.setattr("elastic.coordinator.restores._PATIENCE_S", 0.0)
        await roster()

    asyncio.run(play())
    stopped, waits = desk.membership.stopped, told is seen is AWAY
    assert stopped is not None and "run the same name again once its store" in str(stopped.error)
    assert decide_status_of(stopped.cause) == 1, "a retry may help"
    happened = read_events(desk.paths.events)
    assert sum(isinstance(e, events.RestoreWaits) for e in happened) == waits, "told once"
    assert looks.count(GENERATION) > 1 if waits else looks == [GENERATION]
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == [20]


@pytest.mark.parametrize("after_a_loss", [True, False])
def test_a_store_that_comes_back_is_read_again_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, after_a_loss: bool
) -> None:
    """And where it is away once more, after steps were done, it has its time again: also where the
    run has gone back without the loss of a worker."""
    answers = iter([True, False, True, False])
    monkeypatch.setattr("elastic.coordinator.restores._LOOK_S", 0.0)

    def look(*_: Any) -> Any:
        if next(answers):
            raise AWAY
        return load_manifest(desk.store, KEYS, 20)

    monkeypatch.setattr("elastic.coordinator.restores.look_again", look)
    progress = desk.membership.progress

    async def play() -> None:
        for _ in range(2):
            await desk.restores.failed("a", 20, progress.generation, AWAY)
            assert desk.membership.stopped is None
            progress.begin(20, back=True)
            progress.record(20)
            monkeypatch.setattr("elastic.coordinator.restores._PATIENCE_S", 0.0)
            if not after_a_loss:
                progress.interrupted(20)
            progress.begin(20, back=True)

    asyncio.run(asyncio.wait_for(play(), 30))
    assert desk.membership.stopped is None and desk.failed() == []


def take_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator does not reach the store either, and looks once for each roster."""

    def look(*_: Any) -> None:
        raise AWAY

    monkeypatch.setattr("elastic.coordinator.restores._ANSWER_S", 0.0)
    monkeypatch.setattr("elastic.coordinator.restores.look_again", look)


def test_a_store_that_is_away_ends_the_run_before_the_network_is_blamed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`decide_in_vain` would, with the next regroup."""
    take_away(monkeypatch)
    progress = desk.membership.progress

    async def play() -> None:
        while desk.membership.stopped is None:
            await desk.restores.failed("a", 20, progress.generation, AWAY)
            assert progress.in_vain < 8
            progress.interrupted(20)
            progress.begin(20, back=True)

    asyncio.run(asyncio.wait_for(play(), 30))
    assert desk.membership.stopped is not None
    assert "no answer [ReadTimeout]. Nothing was changed" in str(desk.membership.stopped.error)


def test_a_machine_that_cannot_reach_the_store_is_replaced(desk: Desk) -> None:
    """Its mount is stale, or its clock is off. Once it may be the store that was away for a while,
    and for two of a roster."""
    error = StoreUnavailableError("the mount", errno.ESTALE, "Stale file handle")

    async def play() -> None:
        for name in ("a", "b"):
            await desk.restores.failed(desk.worker(name), 20, GENERATION, error)
            await desk.restores.failed(name, 20, GENERATION, error)  # the next worker there
        await asyncio.sleep(0)  # the agents are told aside
        assert desk.agents.killed == [] and desk.membership.stopped is None
        desk.membership.progress.generation += 1  # all try again
        await desk.restores.failed("a", 20, GENERATION + 1, error)
        await asyncio.sleep(0)
        assert desk.agents.killed == ["a"] and desk.membership.stopped is None
        await desk.restores.failed("b", 20, GENERATION + 1, error)

    asyncio.run(play())
    assert "b" not in desk.agents.killed and desk.membership.stopped is not None
    assert "Stale file handle (errno 116). Nothing was" in str(desk.membership.stopped.error)
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == [20]


def test_a_reader_without_the_mount_costs_no_checkpoint(desk: Desk, tmp_path: Path) -> None:
    """Nor does one whose memory or network card flips bits: the machine is at fault."""
    with pytest.raises(NotCommittedError) as missing:
        load_manifest(open_store(tmp_path / "disk"), KEYS, 20)
    (sound, *_) = load_manifest(desk.store, KEYS, 20).segments
    flipped = CorruptError(sound, "its CRC32 differed twice", 0, (0, 512))
    gone = MissingError(f"s3://bucket/run/{sound}", "no such object")

    async def play() -> None:
        for name, error in (("a", missing.value), ("b", flipped), ("c", gone)):
            await desk.restores.failed(desk.worker(name), 20, GENERATION, error)
        await asyncio.sleep(0)  # the agents are told aside

    asyncio.run(play())
    assert desk.agents.killed == ["a", "b", "c"]
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == []
    assert (desk.membership.progress.restore_step, desk.membership.stopped) == (20, None)
    lost = [e for e in read_events(desk.paths.events) if isinstance(e, events.WorkerLost)]
    assert [event.cause for event in lost] == ["storage"] * 3
    assert "reads well on the coordinator's machine" in lost[0].detail


def test_a_look_at_a_large_one_takes_as_long_as_it_takes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store answers: a look that was given up would cost a sound checkpoint."""
    monkeypatch.setattr("elastic.coordinator.restores._ANSWER_S", 0.0)
    (sound, *_) = load_manifest(desk.store, KEYS, 20).segments
    flipped = CorruptError(sound, "its CRC32 differed twice", 0, (0, 512))
    asyncio.run(desk.restores.failed(desk.worker("a"), 20, GENERATION, flipped))
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == []


def test_one_that_was_lost_before_it_could_tell_changes_nothing(desk: Desk) -> None:
    error = StoreUnavailableError("the mount", errno.ESTALE, "Stale file handle")
    asyncio.run(desk.restores.failed("a", 20, GENERATION, error))
    assert desk.agents.killed == [] and desk.membership.stopped is None
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == []


def test_of_two_that_have_opened_two_records_the_one_with_another_is_lost(
    desk: Desk, tmp_path: Path
) -> None:
    """Below a mount that is missing lies an old copy, of which all CRCs are right."""
    other = open_store(tmp_path / "disk")
    write_state(other, {"w": torch.randn(4, 4)}, step=20)
    records = {
        "a": load_manifest(desk.store, KEYS, 20).sha256,
        "b": load_manifest(other, KEYS, 20).sha256,
    }

    async def play() -> None:
        for name, sha256 in records.items():
            error = OtherRecordError(20, sha256)
            await desk.restores.failed(desk.worker(name), 20, GENERATION, error)
        await asyncio.sleep(0)  # the agents are told aside

    asyncio.run(play())
    assert desk.agents.killed == ["b"]
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == []
    assert (desk.membership.progress.restore_step, desk.membership.stopped) == (20, None)
    (lost,) = [e for e in read_events(desk.paths.events) if isinstance(e, events.WorkerLost)]
    assert lost.cause == "storage"
    assert records["b"][:16] in lost.detail and "Mount the same storage" in lost.detail


def test_two_machines_that_read_other_bytes_are_believed(desk: Desk) -> None:
    """The coordinator's may have had them from its own cache. Else reader after reader is lost."""
    (sound, *_) = load_manifest(desk.store, KEYS, 20).segments
    flipped = CorruptError(sound, "its CRC32 differed twice", 0, (0, 512))

    async def play() -> None:
        for name in ("a", "b"):
            await desk.restores.failed(desk.worker(name), 20, GENERATION, flipped)
        await asyncio.sleep(0)

    asyncio.run(play())
    assert desk.agents.killed == ["a"]
    assert list_steps(desk.store, KEYS) == [10] and desk.failed() == [20]


def test_two_machines_that_read_two_checkpoints_of_a_step_are_not(desk: Desk) -> None:
    """The first one was given up, and the step saved anew."""
    (sound, *_) = load_manifest(desk.store, KEYS, 20).segments
    flipped = CorruptError(sound, "its CRC32 differed twice", 0, (0, 512))

    async def play() -> None:
        await desk.restores.failed(desk.worker("a"), 20, GENERATION, flipped)
        desk.records.note(
            events.CheckpointCommitted(time=1.0, step=20, generation=4, bytes=1, seconds=1.0)
        )
        await desk.restores.failed(desk.worker("b"), 20, GENERATION, flipped)
        await asyncio.sleep(0)

    asyncio.run(play())
    assert desk.agents.killed == ["a", "b"]
    assert list_steps(desk.store, KEYS) == [10, 20] and desk.failed() == []


def test_what_is_damaged_for_all_is_found_so_here(desk: Desk) -> None:
    """A segment that is gone, a record of another run, and a model that is another."""
    (segment, *_) = load_manifest(desk.store, KEYS, 20).segments
    desk.store.delete(segment)
    asyncio.run(desk.restores.failed("a", 20, GENERATION, MissingError(segment, "no such object")))
    assert desk.failed() == [20] and list_steps(desk.store, KEYS) == [10]
    error = IncompatibleError("w", "float32 [4, 4] in the checkpoint, absent in the model")
    asyncio.run(desk.restores.failed("a", 10, GENERATION, error))
    assert desk.failed() == [20, 10] and desk.agents.killed == []


def test_a_record_of_another_run_is_given_up(desk: Desk) -> None:
    write_state(
        desk.store, {"w": torch.randn(4, 4)}, step=30, state={"run": {"id": "x", "name": "x"}}
    )
    desk.membership.progress.checkpointed(30)
    error = CorruptError(KEYS.commit(30), "run: it was written by run 'x'")
    asyncio.run(desk.restores.failed("a", 30, GENERATION, error))
    assert desk.failed() == [30] and list_steps(desk.store, KEYS) == [10, 20]


def test_a_record_that_lacks_a_number_is_given_up_and_nobody_is_killed(desk: Desk) -> None:
    """It is whole, and the same for all who read it."""
    write_state(desk.store, {"w": torch.randn(4, 4)}, step=30, state={"optimizer_steps": 3})
    desk.membership.progress.checkpointed(30)
    with pytest.raises(CorruptError) as raised:
        numbers_of(30, load_manifest(desk.store, KEYS, 30).training_state)

    async def play() -> None:
        for name in ("a", "b"):
            await desk.restores.failed(desk.worker(name), 30, GENERATION, raised.value)
        await asyncio.sleep(0)  # the agents are told aside

    asyncio.run(play())
    assert desk.agents.killed == []
    assert desk.failed() == [30] and list_steps(desk.store, KEYS) == [10, 20]
    assert (desk.membership.progress.restore_step, desk.membership.stopped) == (20, None)


@pytest.mark.parametrize(("snapshot", "left"), [(0, [10]), (15, [])])
def test_the_last_one_stays_unless_there_is_a_snapshot(
    desk: Desk, snapshot: int, left: list[int]
) -> None:
    desk.membership.progress.snapshotted(snapshot)
    for step in (20, 10):
        asyncio.run(desk.restores.failed("a", step, GENERATION, desk.damage(step)))
    assert desk.membership.progress.restore_step == 0
    assert list_steps(desk.store, KEYS) == left


def test_losses_do_not_renew_the_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch)
    progress = desk.membership.progress

    async def play() -> None:
        for _ in range(40):
            await desk.restores.failed("a", 20, progress.generation, AWAY)
            if desk.membership.stopped is not None:
                return
            desk.restores._away_since_s -= 400
            progress.lost()
            progress.interrupted(20)
            progress.begin(20, back=True)

    asyncio.run(asyncio.wait_for(play(), 30))
    assert desk.membership.stopped is not None
