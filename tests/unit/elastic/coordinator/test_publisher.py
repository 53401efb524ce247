"""A checkpoint is committed with the last of its parts; one that lacks a part is counted."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkpointing import (
    Attempt,
    CheckpointConfig,
    Keys,
    NotCommittedError,
    Receipt,
    S3Config,
    SliceError,
    StoreUnavailableError,
    TensorSlice,
    commit,
    list_steps,
    open_store,
    retire,
    verify_checkpoint,
    write_shared,
)
from elastic.coordinator.publisher import Publisher
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.save_wish import SaveWish
from elastic.protocol import events
from elastic.protocol.run_paths import RunPaths
from tests.support.coordinator_desk import CoordinatorDesk
from tests.support.fakes.s3_server import BUCKET, faulty_s3_server

WRITERS = 2


def part(paths: RunPaths, rank: int, step: int, generation: int = 1) -> Receipt:
    """Row `rank` of a tensor with a row for each writer, written."""
    attempt = Attempt(rank=rank, step=step, generation=generation)
    row = TensorSlice("param/w", (WRITERS, 4), "uint8", (rank, 0), (1, 4))
    store = open_store(paths.checkpoints)
    return write_shared(store, Keys(), attempt, [row], memoryview(bytes(64)))


async def aside() -> None:
    """Waits for what is done beside."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


def receipts_of(desk: CoordinatorDesk, checkpoint: CheckpointConfig | None = None) -> Receipts:
    config = replace(desk.config, checkpoint=checkpoint or desk.config.checkpoint)
    return Receipts(
        config, desk.membership, desk.dispatcher, desk.records, SaveWish(desk.membership)
    )


async def take_all(receipts: Receipts, *parts: Receipt) -> None:
    for receipt in parts:
        await receipts.take(receipt, {}, 0.0, WRITERS)


def test_a_save_that_lacks_a_part(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=0)

    async def play() -> None:
        assert await publisher.take(part(paths, 1, 4), {}, WRITERS) is None
        # Parts of two generations, as of replicas that differ in whether they saw the commit.
        assert await publisher.take(part(paths, 0, 6, generation=1), {}, WRITERS) is None
        assert await publisher.take(part(paths, 1, 6, generation=2), {}, WRITERS) is None
        assert list_steps(open_store(paths.checkpoints), Keys()) == []
        assert await publisher.take(part(paths, 0, 8, generation=2), {}, WRITERS) is None
        assert await publisher.take(part(paths, 1, 8, generation=2), {}, WRITERS) is not None

    asyncio.run(play())
    assert list_steps(open_store(paths.checkpoints), Keys()) == [8]
    assert publisher.lost == {4: 1, 6: 1}
    assert publisher.saved(8) and not publisher.saved(4)


def test_what_the_next_save_may_refer_to(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=2)

    async def play() -> None:
        assert await publisher.newest() is None, "what an earlier start wrote, nobody here knows"
        await publisher.take(part(paths, 0, 4), {}, WRITERS)
        assert await publisher.newest() is None
        await publisher.take(part(paths, 1, 4), {}, WRITERS)
        assert await publisher.newest() == (4, 1)
        with pytest.raises(SliceError):
            await publisher.take(part(paths, 0, 6), {}, 1)
        assert await publisher.newest() is None
        await publisher.take(part(paths, 0, 8), {}, WRITERS)
        await publisher.take(part(paths, 1, 8), {}, WRITERS)
        publisher.forget(8)
        assert await publisher.newest() is None

    asyncio.run(play())


def test_later_checkpoints_of_another_run_cost_this_one_none_of_its_own(tmp_path: Path) -> None:
    """`keep_last` counts what this run committed, and deletes nothing that is later. The other one
    may have had more rosters."""
    mine, other = RunPaths(root=tmp_path), RunPaths(root=tmp_path / "other")
    config = CheckpointConfig(keep_last=2)

    async def play(paths: RunPaths, *steps: int, generation: int = 1) -> None:
        publisher = Publisher(paths, config, versions={}, newest=0)
        state = {"run": {"name": "r", "id": str(paths.root)}}
        for step in steps:
            await publisher.take(part(paths, 0, step, generation), state, WRITERS)
            await publisher.take(part(paths, 1, step, generation), state, WRITERS)
            await publisher.retire(step)

    asyncio.run(play(mine, 2))
    asyncio.run(play(other, 20, 30, generation=9))
    shutil.copytree(other.root / "checkpoints", tmp_path / "checkpoints", dirs_exist_ok=True)
    asyncio.run(play(mine, 4, 6))
    store = open_store(mine.checkpoints)
    assert list_steps(store, Keys()) == [4, 6, 20, 30]
    for step in (4, 6, 20, 30):
        assert verify_checkpoint(store, Keys(), step, threads=1).findings == ()


def test_saves_that_only_another_machine_sees_cost_no_checkpoint(tmp_path: Path) -> None:
    """The store is not mounted where one writer runs: the last sound checkpoint stays."""
    paths, disk = RunPaths(root=tmp_path / "mount"), RunPaths(root=tmp_path / "disk")
    publisher = Publisher(paths, CheckpointConfig(keep_last=1), versions={}, newest=0)

    async def play() -> None:
        await publisher.take(part(paths, 0, 4), {}, WRITERS)
        await publisher.take(part(paths, 1, 4), {}, WRITERS)
        for step in (6, 8):
            await publisher.take(part(paths, 0, step), {}, WRITERS)
            with pytest.raises(NotCommittedError, match="writer 1"):
                await publisher.take(part(disk, 1, step), {}, WRITERS)

    asyncio.run(play())
    store = open_store(paths.checkpoints)
    assert list_steps(store, Keys()) == [4]
    assert verify_checkpoint(store, Keys(), 4, threads=1).findings == ()


def test_that_old_ones_cannot_be_deleted_is_told_once_until_they_can(tmp_path: Path) -> None:
    desk = CoordinatorDesk(tmp_path)
    receipts = receipts_of(desk, CheckpointConfig(keep_last=1))

    async def save(step: int, *, stuck: bool) -> None:
        parts = [part(desk.paths, rank, step) for rank in range(WRITERS)]
        for one in parts:
            await receipts.take(one, {}, 0.0, WRITERS)
        if stuck:  # a segment that cannot be deleted: it is a directory
            path = desk.paths.root / "checkpoints" / parts[0].segments[0].key
            path.unlink()
            path.mkdir()

    async def play() -> None:
        told = []
        for step in (2, 4, 6, 8, 10):
            await save(step, stuck=step in (2, 4, 8))
            told.append(len(desk.happened(events.RetentionFailed)))
        assert told == [0, 1, 1, 1, 2]

    asyncio.run(play())
    assert "000000000002-1-0" in desk.happened(events.RetentionFailed)[0].reason


def test_a_commit_stands_whatever_becomes_of_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one, too: the run would wait for it for ever."""
    desk = CoordinatorDesk(tmp_path)
    receipts = receipts_of(desk)
    last = desk.membership.until

    def no_thread(*_args: Any, **_how: Any) -> list[int]:
        raise RuntimeError("can't start new thread")

    async def play() -> None:
        for rank in range(WRITERS):
            await receipts.take(part(desk.paths, rank, last), {}, 0.0, WRITERS)

    monkeypatch.setattr("elastic.coordinator.publisher.retire", no_thread)
    asyncio.run(play())
    assert [event.step for event in desk.happened(events.CheckpointCommitted)] == [last]
    assert desk.membership.progress.restore_step == last
    (failed,) = desk.happened(events.RetentionFailed)
    assert failed.reason == "RuntimeError: can't start new thread"


@pytest.mark.parametrize("lost", [False, True])
def test_an_old_one_is_deleted_when_the_run_can_go_back_to_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """All copies of the state may be lost while the new one is committed (`lost`), or the old one
    deleted: the run goes back to the one that it knows."""
    desk = CoordinatorDesk(tmp_path)
    receipts = receipts_of(desk, CheckpointConfig(keep_last=1))
    progress = desk.membership.progress
    known_then: list[int] = []

    def going_back(*args: Any, **how: Any) -> Any:
        manifest = commit(*args, **how)
        if lost and manifest.step == 4:
            progress.begin(progress.stored, back=True)
        return manifest

    def watched(*args: Any, **how: Any) -> list[int]:
        known_then.append(progress.restore_step)
        return retire(*args, **how)

    async def save(step: int) -> None:
        for rank in range(WRITERS):
            receipt = part(desk.paths, rank, step, progress.generation)
            await receipts.take(receipt, {}, 0.0, WRITERS)

    async def play() -> None:
        await save(2)
        await save(4)

    monkeypatch.setattr("elastic.coordinator.publisher.commit", going_back)
    monkeypatch.setattr("elastic.coordinator.publisher.retire", watched)
    asyncio.run(play())
    assert known_then == ([2] if lost else [2, 4])
    kept = list_steps(open_store(desk.paths.checkpoints), Keys())
    assert kept == [progress.restore_step] == [2 if lost else 4]


def test_failed_saves_leave_nothing_behind(tmp_path: Path) -> None:
    """Or a store that was short of room for a while has none for the next one, ever."""
    desk = CoordinatorDesk(tmp_path)
    disk, now = RunPaths(root=tmp_path / "disk"), desk.membership.progress.generation
    receipts = receipts_of(desk)
    store = open_store(desk.paths.checkpoints)
    take = partial(take_all, receipts)

    async def play() -> None:
        await take(part(desk.paths, 0, 2, now), part(desk.paths, 1, 2, now))
        committed = store.list("d/")
        # One writes to its own disk: the commit finds that.
        await take(part(desk.paths, 0, 4, now), part(disk, 1, 4, now))
        await aside()
        assert store.list("d/") == committed
        # One has written a part of its own, and says that there is no room; another comes later.
        await take(part(desk.paths, 0, 6, now))
        part(desk.paths, 1, 6, now)
        await receipts.failed(6, now, "no space")
        await aside()
        assert store.list("d/") == committed
        await take(part(desk.paths, 0, 6, now), part(desk.paths, 1, 6, now))
        await aside()
        assert store.list("d/") == committed and not receipts.saved(6)
        # A later save is not in the way of it, nor what a failure says of the one before.
        await take(part(desk.paths, 0, 8, now), part(desk.paths, 1, 8, now))
        await receipts.failed(8, now, "told too late")
        await aside()

    asyncio.run(play())
    assert list_steps(store, Keys()) == [2, 8]
    for step in (2, 8):
        assert verify_checkpoint(store, Keys(), step, threads=1).findings == ()
    assert len(desk.happened(events.CheckpointSkipped)) == 2
    assert desk.membership.stopped is None, "the last one alone ends a run"


def test_a_save_of_steps_that_are_in_no_record_does_not_count(tmp_path: Path) -> None:
    """Those who did them are lost with what they had to tell, and the others do them again."""
    desk = CoordinatorDesk(tmp_path)
    receipts, progress = receipts_of(desk), desk.membership.progress
    before, take = progress.generation, partial(take_all, receipts)
    progress.record(5)
    progress.generation += 1

    async def play() -> None:
        for step in (7, 6):
            await take(part(desk.paths, 0, step, before), part(desk.paths, 1, step, before))
        await aside()

    asyncio.run(play())
    assert list_steps(open_store(desk.paths.checkpoints), Keys()) == [6]


def test_a_failed_save_takes_with_it_what_those_before_have_left(tmp_path: Path) -> None:
    """Where there is room for less than one more, no commit would ever come to sweep them."""
    desk = CoordinatorDesk(tmp_path)
    progress = desk.membership.progress
    receipts = receipts_of(desk)
    store = open_store(desk.paths.checkpoints)
    take = partial(take_all, receipts)

    async def play() -> None:
        now = progress.generation
        await take(part(desk.paths, 0, 2, now), part(desk.paths, 1, 2, now))
        committed = store.list("d/")
        await take(part(desk.paths, 0, 4, now))  # the node of the other is gone
        part(desk.paths, 1, 6, now)  # as are both of these, without a word
        progress.generation += 1
        await take(part(desk.paths, 0, 8, now + 1))
        late = part(desk.paths, 1, 8, now)
        ahead = part(desk.paths, 0, 12, now + 1)
        await receipts.failed(10, now + 1, "no space")
        await aside()
        assert store.list("d/") == sorted([*committed, *[s.key for s in ahead.segments]])
        await take(late, part(desk.paths, 1, 4, now), part(desk.paths, 1, 8, now + 1))  # too late
        await aside()
        assert store.list("d/") == sorted([*committed, *[s.key for s in ahead.segments]])
        await take(ahead, part(desk.paths, 1, 12, now + 1))
        await aside()

    asyncio.run(play())
    assert list_steps(store, Keys()) == [2, 12]
    for step in (2, 12):
        assert verify_checkpoint(store, Keys(), step, threads=1).findings == ()
    assert [event.step for event in desk.happened(events.CheckpointSkipped)] == [10, 8, 4]


def test_what_a_failed_save_could_not_delete_goes_with_the_next_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(root=tmp_path)
    publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=0)

    def fails(*_args: Any) -> Any:
        raise StoreUnavailableError("d/", None, "no answer")

    async def play() -> None:
        await publisher.take(part(paths, 0, 4), {}, WRITERS)
        with monkeypatch.context() as patch:
            patch.setattr("elastic.coordinator.publisher.sweep_attempts", fails)
            await publisher.give_up(4, 1)
        await publisher.give_up(6, 1)

    asyncio.run(play())
    assert open_store(paths.checkpoints).list("d/") == []


def test_commits_list_what_is_kept_only_after_something_went_wrong(tmp_path: Path) -> None:
    """It may be millions of segments: 1,000 for each request."""
    listed = list[int]()
    with faulty_s3_server() as faults:
        place = S3Config(url=f"s3://{BUCKET}/{tmp_path.name}", endpoint_url=faults.url)
        paths = RunPaths(root=tmp_path, store=place)
        config = CheckpointConfig(every_steps=2, keep_last=1, keep_every=4)
        publisher = Publisher(paths, config, versions={}, newest=0)
        store = open_store(place)

        async def save(step: int, generation: int = 1) -> None:
            for rank in range(WRITERS):
                await publisher.take(part(paths, rank, step, generation), {}, WRITERS)
            before = faults.count("list", prefix=f"{tmp_path.name}/d/")
            await publisher.retire(step)
            listed.append(faults.count("list", prefix=f"{tmp_path.name}/d/") - before)

        async def play() -> None:
            for step in range(2, 18, 2):
                await save(step)
            assert listed == [1, 1, 0, 0, 0, 0, 0, 0], "the first of a start, and of a generation"
            part(paths, 0, 18)  # its writer is gone without a word
            await save(20, generation=2)
            await save(22, generation=2)
            await save(24, generation=2)
            await publisher.take(part(paths, 1, 22, generation=2), {}, WRITERS)  # too late
            await save(26, generation=2)
            await publisher.take(part(paths, 0, 27, generation=2), {}, WRITERS)  # of a lost save
            await save(28, generation=2)
            await save(30, generation=2)
            assert listed[8:] == [0, 1, 0, 1, 1, 0]

        asyncio.run(play())
        kept = [4, 8, 12, 16, 20, 24, 28, 30]
        assert list_steps(store, Keys()) == kept
        assert sorted({Keys().step_of(key) or 0 for key in store.list("d/")}) == kept
        assert len(store.list("d/")) == len(kept) * WRITERS


@pytest.mark.parametrize("failing", ["open_store", "retire"])
def test_what_a_retention_that_failed_was_to_look_for_is_found_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    paths = RunPaths(root=tmp_path)
    publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=0)
    store = open_store(paths.checkpoints)

    def fails(*_args: Any, **_how: Any) -> Any:
        raise StoreUnavailableError("m/", None, "no answer")

    async def save(step: int) -> None:
        for rank in range(WRITERS):
            await publisher.take(part(paths, rank, step), {}, WRITERS)

    async def play() -> None:
        for step in (2, 4, 6):
            await save(step)
            await publisher.retire(step)
        await publisher.take(part(paths, 0, 8), {}, WRITERS)
        await save(10)
        with monkeypatch.context() as patch:
            patch.setattr(f"elastic.coordinator.publisher.{failing}", fails)
            assert await publisher.retire(10) is not None
        await save(12)
        await publisher.retire(12)

    asyncio.run(play())
    assert {Keys().step_of(key) for key in store.list("d/")} == {10, 12}


def test_parts_that_count_no_longer_are_deleted_once_the_run_is_past_them(tmp_path: Path) -> None:
    """Writers of before the run went back write on, or say that they could not."""
    desk = CoordinatorDesk(tmp_path)
    receipts = receipts_of(desk)
    progress = desk.membership.progress
    store = open_store(desk.paths.checkpoints)

    async def save(step: int) -> None:
        for rank in range(WRITERS):
            receipt = part(desk.paths, rank, step, progress.generation)
            await receipts.take(receipt, {}, 0.0, WRITERS)

    async def play() -> None:
        now = progress.generation
        for step in (2, 4):
            await save(step)
        progress.begin(4, back=True)
        await save(6)
        await save(8)
        await receipts.take(part(desk.paths, 0, 9, now), {}, 0.0, WRITERS)
        part(desk.paths, 1, 11, now)
        await receipts.failed(11, now, "no space")
        await save(10)
        assert [Keys().step_of(key) for key in store.list("d/")].count(9) == 0
        await save(12)

    asyncio.run(play())
    assert {Keys().step_of(key) for key in store.list("d/")} == {10, 12}


@pytest.mark.timeout(60)
def test_a_store_that_deletes_nothing_holds_no_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the run could not end: each save in the background is waited for there."""
    desk, answers = CoordinatorDesk(tmp_path), threading.Event()
    now = desk.membership.progress.generation
    receipts = receipts_of(desk)

    def hangs(*_args: Any, **_how: Any) -> list[str]:
        answers.wait()
        return []

    async def play() -> None:
        for rank in range(WRITERS):
            await receipts.take(part(desk.paths, rank, 2, now), {}, 0.0, WRITERS)
        await receipts.failed(4, now, "no space")
        await aside_begun()
        await receipts.take(part(desk.paths, 0, 4, now), {}, 0.0, WRITERS)  # too late
        answers.set()
        await aside()

    async def aside_begun() -> None:
        while not receipts._publisher.gave_up(4, now):
            await asyncio.sleep(0)

    for name in ("retire", "sweep_attempts"):
        monkeypatch.setattr(f"elastic.coordinator.publisher.{name}", hangs)
    monkeypatch.setattr("elastic.coordinator.receipts._DELETING_S", 0.01)
    asyncio.run(play())
    assert [event.step for event in desk.happened(events.CheckpointCommitted)] == [2]


@pytest.mark.parametrize("anew", [False, True])
def test_what_may_be_committed_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    """The answer to the commit is lost, or so is the coordinator."""
    paths = RunPaths(root=tmp_path)
    store, keys = open_store(paths.checkpoints), Keys()
    receipts = [part(paths, rank, 6) for rank in range(WRITERS)]
    record = keys.commit(6)

    def unanswered(*args: Any, **how: Any) -> Any:
        commit(*args, **how)
        (paths.root / "checkpoints" / record).rename(tmp_path / "on its way")
        raise StoreUnavailableError(record, None, "no answer")

    async def play() -> None:
        publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=0)
        monkeypatch.setattr("elastic.coordinator.publisher.commit", unanswered)
        await publisher.take(receipts[0], {}, WRITERS)
        with pytest.raises(StoreUnavailableError):
            await publisher.take(receipts[1], {}, WRITERS)
        if anew:
            publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=0)
            publisher.replay(frozenset(), 6)
        await publisher.give_up(6, 1)
        await publisher.give_up(8, 2)

    asyncio.run(play())
    (tmp_path / "on its way").rename(paths.root / "checkpoints" / record)
    assert verify_checkpoint(store, keys, 6, threads=1).findings == ()


def test_a_late_failure_of_an_old_attempt_does_not_end_the_run(tmp_path: Path) -> None:
    """Its node is cut off: the others have written the last checkpoint, or will."""
    desk = CoordinatorDesk(tmp_path)
    receipts = receipts_of(desk)
    desk.membership.progress.generation += 1  # a regroup after a fault: what was held stays
    last, now = desk.membership.until, desk.membership.progress.generation

    async def play() -> None:
        await receipts.failed(last, now - 1, "no network")
        assert desk.membership.stopped is None
        for rank in range(WRITERS):
            await receipts.take(part(desk.paths, rank, last, now), {}, 0.0, WRITERS)
        await receipts.failed(last, now, "no network")
        assert desk.membership.stopped is None and receipts.saved(last)
        receipts.forget(last)
        await receipts.failed(last, now, "no network")

    asyncio.run(play())
    assert desk.membership.stopped is not None
    assert "the last checkpoint could not be written" in str(desk.membership.stopped.error)
    assert len(desk.happened(events.CheckpointSkipped)) == 2


def test_retention_goes_on_with_credentials_that_were_renewed(tmp_path: Path) -> None:
    # What the server has set goes back after this.
    with faulty_s3_server() as faults, pytest.MonkeyPatch.context() as patch:
        place = S3Config(url=f"s3://{BUCKET}/{tmp_path.name}", endpoint_url=faults.url)
        paths = RunPaths(root=tmp_path, store=place)
        publisher = Publisher(paths, CheckpointConfig(keep_last=1), versions={}, newest=0)

        async def save(step: int) -> str | None:
            for rank in range(WRITERS):
                await publisher.take(part(paths, rank, step), {}, WRITERS)
            return await publisher.retire(step)

        asyncio.run(save(2))
        patch.setenv("AWS_ACCESS_KEY_ID", "renewed")
        expired = faults.inject("error", kind="list", status=400, code="ExpiredToken")
        with pytest.raises(StoreUnavailableError, match="expired"):
            asyncio.run(save(4))
        assert asyncio.run(save(6)) is None and expired.fired == 1
        assert "Credential=renewed/" in faults.headers("list")[-1]["authorization"]
        assert list_steps(open_store(place), Keys()) == [6]


def test_one_writer_is_enough_where_there_is_one(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=0)
    whole = TensorSlice("param/w", (2, 4), "uint8", (0, 0), (2, 4))
    receipt = write_shared(
        open_store(paths.checkpoints),
        Keys(),
        Attempt(rank=0, step=2, generation=1),
        [whole],
        memoryview(bytes(64)),
    )
    assert asyncio.run(publisher.take(receipt, {}, 1)) is not None


def test_what_a_killed_coordinator_committed_is_told_of_once(tmp_path: Path) -> None:
    """The next one finds it in the store, and gets the receipts once more."""
    paths = RunPaths(root=tmp_path)
    receipts = [part(paths, rank, 6) for rank in range(WRITERS)]
    others = [part(paths, rank, 6, generation=2) for rank in range(WRITERS)]

    async def hand_in(publisher: Publisher, parts: list[Receipt]) -> int | None:
        return [await publisher.take(part, {}, WRITERS) for part in parts][-1]

    def anew(told: set[int]) -> Publisher:
        publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=6)
        publisher.replay(told, 6)
        return publisher

    first = Publisher(paths, CheckpointConfig(), versions={}, newest=0)
    size = asyncio.run(hand_in(first, receipts))
    assert size is not None
    assert asyncio.run(hand_in(anew({6}), receipts)) is None
    publisher = anew(set())
    assert publisher.saved(6)
    assert asyncio.run(hand_in(publisher, others)) is None  # not what is committed
    assert asyncio.run(hand_in(publisher, receipts)) == size
    assert asyncio.run(hand_in(publisher, receipts)) is None
    assert list_steps(open_store(paths.checkpoints), Keys()) == [6]


def test_a_part_of_an_earlier_save_that_is_handed_in_again_is_no_lost_save(tmp_path: Path) -> None:
    """As by a living spare, to a coordinator that was started anew."""
    paths = RunPaths(root=tmp_path)
    publisher = Publisher(paths, CheckpointConfig(), versions={}, newest=6)

    async def play() -> None:
        assert await publisher.take(part(paths, 0, 4), {}, WRITERS) is None
        for rank in range(WRITERS):
            await publisher.take(part(paths, rank, 8), {}, WRITERS)

    asyncio.run(play())
    assert publisher.saved(8) and publisher.lost == {}
