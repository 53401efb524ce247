"""The run goes back: where to, what counts no more, and what the next roster is told."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing import (
    Attempt,
    Receipt,
    Snapshot,
    TensorSlice,
    list_steps,
    open_store,
    pin,
    write_shared,
)
from elastic.config import HealthConfig
from elastic.coordinator import dispatcher as dispatcher
from elastic.coordinator.corruption import Corruption
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.retreat import Retreat
from elastic.coordinator.save_wish import SaveWish
from elastic.coordinator.snapshots import Snapshots
from elastic.coordinator.training_watch import TrainingWatch
from elastic.protocol import events
from elastic.protocol.messages import Report, Run
from elastic.training_config import TrainingHealthConfig
from tests.support.coordinator_desk import CoordinatorDesk
from tests.support.tiny_checkpoint import KEYS, write_state
from trainer.loop.samples import Skip
from trainer.replication.step_commit import Commit

PATIENCE_S = 30.0


def usual(step: int) -> float:
    """The loss of each lane in a step."""
    return 1.0 + 0.01 * (step * step % 7)


class Desk(CoordinatorDesk):
    """The parts that have to do with it: a, b and c train in generation 1, and there are
    checkpoints of steps 4, 8 and 12."""

    def __init__(self, root: Path, health: HealthConfig | None = None) -> None:
        super().__init__(root, health=health)
        self.store = open_store(self.paths.checkpoints)
        for step in (4, 8, 12):
            write_state(self.store, {"w": torch.randn(4, 4)}, step=step)
            self.membership.progress.checkpointed(step)
        self.receipts = Receipts(
            self.config, self.membership, self.dispatcher, self.records, SaveWish(self.membership)
        )
        self.snapshots = Snapshots(
            self.paths, self.membership.progress, _no_holder, self.records.note,
            versions={}, found=_snapshot(14), timeout_s=1.0,
        )  # fmt: skip
        for node in "ABC":
            self.snapshots.node_joined(node)
        self.retreat = Retreat(
            self.config,
            self.membership,
            self.dispatcher,
            self.records,
            self.receipts,
            self.snapshots,
        )
        parts: dict[str, Any] = {
            "membership": self.membership,
            "dispatcher": self.dispatcher,
            "records": self.records,
            "receipts": self.receipts,
            "retreat": self.retreat,
        }
        self.corruption = self.judge(start_step=0)
        training = self.config.health.training
        self.training = TrainingWatch(training, 5, **parts)
        self.training.go_on_from(0)
        self.records.note(self.done)  # the roster that `CoordinatorDesk` made
        self.take(0, 14)

    def judge(self, *, start_step: int, compares: bool = True, repeats: bool = True) -> Corruption:
        """Of a run that began there."""
        return Corruption(
            start_step=start_step,
            compares=compares,
            repeats=repeats,
            membership=self.membership,
            dispatcher=self.dispatcher,
            workers=self.workers,
            records=self.records,
            receipts=self.receipts,
            retreat=self.retreat,
        )

    def take(
        self,
        first: int,
        last: int,
        *,
        losses: dict[int, list[float]] | None = None,
        norms: dict[int, float] | None = None,
    ) -> None:
        """Steps are recorded; `losses` of single lanes are not 1.0 each, nor are `norms`."""
        progress = self.membership.progress
        records = [
            replace(
                self.record(step, (losses or {}).get(step)), grad_norm=(norms or {}).get(step, 1.0)
            )
            for step in range(first, last)
        ]
        taken = self.records.take_steps(records)
        assert progress.going_back or [r.step for r in taken] == list(range(first, last))
        self.corruption.take(taken)
        self.training.take(taken)

    def record(self, step: int, lanes: list[float] | None) -> events.StepRecord:
        lanes = lanes or [usual(step)] * 3
        return events.StepRecord(
            step=step, loss=sum(lanes) / 3, grad_norm=1.0, lr=0.1, tokens=8, time=float(step),
            generation=self.membership.progress.generation, replicas=3,
            sample_digests=self.config.ledger.digests(step),
            gradients=torch.tensor(lanes, dtype=torch.float64).numpy().tobytes(),
        )  # fmt: skip

    def regroup(self, step: int, generation: int) -> dict[str, Run]:
        """All that live come, with the state of `step`, and are told what to do."""
        last = Commit(step=step - 1, loss=1.0, grad_norm=1.0, tokens=8, digests=b"", boundary=False)
        for worker, identity in self.workers.started.items():
            self.membership.join(
                Report(
                    identity=identity,
                    built=self.built[worker],
                    step=step,
                    generation=generation,
                    last=last,
                )
            )
        effects = self.membership.advance()
        self.records.write_down(effects)
        return {w: a for w, a in effects.answers.items() if isinstance(a, Run)}

    @property
    def done(self) -> events.RegroupDone:
        lanes = {str(index): list(lanes) for index, lanes in self.membership.roster.lanes.items()}
        return events.RegroupDone(
            time=0.0, generation=1, step=0, replicas=3, lanes=lanes, renumbered={},
            outcome="start", lost_steps=0, repeated_steps=0,
        )  # fmt: skip


Make = Callable[[HealthConfig], Desk]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes one with other bounds."""
    # It would be put off until long after the loop of the test.
    monkeypatch.setattr(dispatcher, "gc", SimpleNamespace(disable=lambda: None, enable=None))
    made: list[Desk] = []

    def one(health: HealthConfig) -> Desk:
        made.append(Desk(tmp_path, health))
        return made[-1]

    yield one
    for desk in made:
        desk.records.end("interrupted", None).result()


@pytest.fixture
def desk(make: Make) -> Desk:
    return make(HealthConfig())


def _no_holder(node: str) -> Any:
    """Nobody calls it."""


def _snapshot(step: int) -> Snapshot:
    manifest: Any = SimpleNamespace(step=step, generation=1, segments={})
    return Snapshot(manifest=manifest, places={})


async def settled(desk: Desk) -> None:
    """What was begun in the background has ended."""
    while desk.dispatcher._tasks:
        await asyncio.gather(*desk.dispatcher._tasks)


def test_all_go_back_to_a_checkpoint_and_what_was_saved_later_is_void(desk: Desk) -> None:
    async def play() -> None:
        await desk.retreat.go_back(at_most=9, reason="told", skip=Skip(10, 3))
        await desk.receipts.take(_receipt(14, generation=1), {}, 0.0, 1)  # begun before it

    asyncio.run(play())
    assert list_steps(desk.store, KEYS) == [4, 8], "those after it are set aside"
    assert desk.happened(events.CheckpointSkipped) == [], "nobody has looked at that receipt"
    assert desk.membership.call == "fault"
    desk.snapshots.node_joined("D")  # looks again for the newest snapshot, which is of step 14
    desk.take(14, 16)  # by workers that have not heard of it yet
    assert desk.membership.progress.recorded == 14, "what will be done again is not recorded"
    runs = desk.regroup(16, generation=1)
    assert set(runs) == {"a", "b", "c"}
    for run in runs.values():
        assert (run.restore, run.step, run.source) == (True, 8, "store")
        assert run.skips == (Skip(10, 3),)
    (back,) = desk.happened(events.WentBack)
    assert (back.step, back.before, back.skip) == (8, 14, [10, 3])
    (_, done) = desk.happened(events.RegroupDone)
    assert (done.outcome, done.lost_steps) == ("restore", 8)
    assert not desk.membership.progress.going_back


def test_a_pinned_one_that_is_given_up_is_kept_for_people(desk: Desk) -> None:
    for step in (4, 12):
        pin(desk.store, KEYS, step)
    asyncio.run(desk.retreat.go_back(at_most=6, reason="they differ"))
    records = [key for key in desk.store.list("m/") if not key.endswith(".claim")]
    given_up = [f"{KEYS.commit(8)}.unreadable", f"{KEYS.commit(12)}.foreign"]
    assert records == [KEYS.commit(4), *given_up]


def test_why_checkpoints_are_set_aside_is_on_the_storage_before(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next coordinator finds them gone and goes on with the state in doubt."""
    done = list[str]()
    fdatasync = os.fdatasync

    def sync(number: int) -> None:
        done.append("synced")
        fdatasync(number)

    def move(self: Retreat, step: int) -> None:
        done.append(f"set aside after {step}")

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(Retreat, "_set_aside_after", move)
    asyncio.run(desk.retreat.go_back(at_most=9, reason="told"))
    assert done == ["synced", "synced", "set aside after 8"]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("skip", [None, Skip(4, 8)])
def test_where_why_cannot_be_written_down_what_is_wrong_is_set_aside_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, skip: Skip | None, stopped: bool
) -> None:
    """Also where the run has been ended meanwhile. State that is wrong must not be gone on from;
    which data to pass over, the next start would not know."""

    def refuses(number: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    if stopped:
        desk.membership.stop("asked to")
    with monkeypatch.context() as disk:
        disk.setattr(os, "fdatasync", refuses)
        asyncio.run(desk.retreat.go_back(at_most=9, reason="told", skip=skip))
    assert list_steps(desk.store, KEYS) == ([4, 8, 12] if skip else [4, 8])
    assert desk.membership.stopped is not None
    assert stopped or "records cannot be written" in str(desk.membership.stopped.error)


def test_a_run_that_has_ended_goes_back_no_more(desk: Desk) -> None:
    """Its records are closed: nobody would know what was set aside, and why."""
    desk.records.end("interrupted", None).result()
    asyncio.run(desk.retreat.go_back(at_most=9, reason="told"))
    assert list_steps(desk.store, KEYS) == [4, 8, 12]
    assert not desk.membership.progress.going_back


def test_without_a_checkpoint_it_goes_back_to_the_seed(desk: Desk) -> None:
    asyncio.run(desk.retreat.go_back(at_most=3, reason="told"))
    runs = desk.regroup(14, generation=1)
    assert {(run.restore, run.step) for run in runs.values()} == {(True, 0)}
    assert list_steps(desk.store, KEYS) == []


def test_two_that_go_back_at_once_go_to_the_earlier(desk: Desk) -> None:
    async def play() -> None:
        await asyncio.gather(
            desk.retreat.go_back(at_most=5, reason="told"),
            desk.retreat.go_back(at_most=9, reason="told"),
        )

    asyncio.run(play())
    assert {run.step for run in desk.regroup(14, generation=1).values()} == {4}
    assert list_steps(desk.store, KEYS) == [4]


# -- who was wrong ---------------------------------------------------------------------------------


def compared(desk: Desk, step: int, *, equal: bool = True) -> None:
    """In the newest roster."""
    generation = desk.membership.roster.generation
    desk.records.note(
        events.ReplicasCompared(time=0.0, step=step, equal=equal, generation=generation)
    )


def test_whose_losses_were_others_the_first_time_is_named(desk: Desk) -> None:
    """Lane 1 is the one of b, both times; from step 11 on the error is in everybody's weights, and
    says nothing of whose lane it shows in."""

    async def play() -> None:
        compared(desk, 9)
        wrong = {step: [usual(step) + 1, usual(step), usual(step)] for step in range(11, 15)}
        wrong[10] = [usual(10), 1.5, usual(10)]
        desk.take(14, 15, losses=wrong)
        # Recorded before the desk was made: what step 10 came to the first time.
        desk.corruption.take([desk.record(step, wrong[step]) for step in range(10, 15)])
        compared(desk, 15, equal=False)
        await desk.corruption.undecided(1, 15, "they differ")
        desk.regroup(15, generation=1)
        assert desk.membership.progress.recorded == 8, "8 is before the equal comparison"
        desk.take(8, 12)
        await settled(desk)

    asyncio.run(play())
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause) == ("b", "corruption")
    assert "step 10 came to other gradients" in lost.detail
    assert desk.agents.killed == ["b"]


@pytest.mark.parametrize("wrong", [[1.5, 1.5, usual(10)], [1.5, 1.5, 1.5]])
def test_nobody_is_named_where_lanes_of_several_differ(desk: Desk, wrong: list[float]) -> None:
    async def play() -> None:
        compared(desk, 9)
        desk.corruption.take([desk.record(10, wrong)])
        await desk.corruption.undecided(1, 14, "they differ")
        desk.regroup(14, generation=1)
        desk.take(8, 12)
        await settled(desk)

    asyncio.run(play())
    assert desk.happened(events.WorkerLost) == []


def test_a_step_of_an_earlier_roster_that_comes_late_names_nobody(desk: Desk) -> None:
    """Others may have had its lanes."""

    async def play() -> None:
        late = replace(desk.record(10, [usual(10), 1.5, usual(10)]), generation=0)
        desk.corruption.take([late])
        await desk.corruption.undecided(1, 14, "they differ")
        desk.regroup(14, generation=1)
        desk.take(0, 12)
        await settled(desk)

    asyncio.run(play())
    assert desk.happened(events.WorkerLost) == []


@pytest.mark.parametrize(("repeats", "named"), [(True, ["b"]), (False, [])])
def test_nobody_is_named_where_a_step_may_come_to_other_bits_the_second_time(
    desk: Desk, repeats: bool, named: list[str]
) -> None:
    async def play() -> None:
        desk.corruption = desk.judge(start_step=0, repeats=repeats)
        desk.records.note(desk.done)
        compared(desk, 9)
        desk.corruption.take([desk.record(10, [usual(10), 1.5, usual(10)])])
        await desk.corruption.undecided(1, 14, "they differ")
        desk.regroup(14, generation=1)
        desk.take(8, 12)
        await settled(desk)

    asyncio.run(play())
    assert [lost.worker for lost in desk.happened(events.WorkerLost)] == named


def test_checkpoints_after_the_one_that_the_run_goes_on_from_are_not_sound_any_more(
    desk: Desk,
) -> None:
    compared(desk, 13)
    assert desk.corruption.sound == 12
    desk.records.note(replace(desk.done, outcome="boundary", step=8, generation=2))
    assert desk.corruption.sound == 12
    desk.records.note(replace(desk.done, outcome="restore", step=4, generation=3))
    assert desk.corruption.sound == 4


def test_steps_that_the_lead_has_yet_to_show_are_waited_for(desk: Desk) -> None:
    async def show() -> None:
        desk.take(14, 16, losses={15: [usual(15), 1.5, usual(15)]})
        await desk.dispatcher.tell()

    async def play() -> None:
        compared(desk, 9)
        await asyncio.gather(desk.corruption.undecided(1, 16, "they differ"), show())
        desk.regroup(16, generation=1)
        desk.take(8, 16)
        await settled(desk)

    asyncio.run(play())
    assert [lost.worker for lost in desk.happened(events.WorkerLost)] == ["b"]


def test_a_second_dispute_over_the_same_steps_ends_the_run(desk: Desk) -> None:
    async def play() -> None:
        compared(desk, 9)
        await desk.corruption.undecided(1, 14, "they differ")
        await desk.corruption.undecided(1, 14, "another column says so, too")
        assert desk.membership.stopped is None
        desk.regroup(14, generation=1)
        desk.take(8, 14)
        await save(desk, 12, generation=2)
        await desk.corruption.undecided(2, 14, "they differ")

    asyncio.run(play())
    assert desk.membership.stopped is not None
    assert "so they did before step 14" in str(desk.membership.stopped.error)
    assert list_steps(desk.store, KEYS) == [8], "the next start is not to go on from 12"


def test_two_slots_that_differ_at_once_are_one_dispute(desk: Desk) -> None:
    async def play() -> None:
        compared(desk, 9)
        compared(desk, 14, equal=False)
        told = (desk.corruption.undecided(1, 14, f"slot {slot} differs") for slot in range(2))
        await asyncio.gather(*told)

    asyncio.run(play())
    assert desk.membership.stopped is None
    assert [back.step for back in desk.happened(events.WentBack)] == [8]


@pytest.mark.parametrize(("step", "settles"), [(13, False), (14, True), (15, True)])
def test_an_equal_comparison_settles_a_dispute_over_what_was_before_it(
    desk: Desk, step: int, settles: bool
) -> None:
    async def play() -> None:
        await desk.corruption.undecided(1, 14, "they differ")
        desk.regroup(14, generation=1)
        desk.take(0, 15)
        compared(desk, step)
        await desk.corruption.undecided(2, 14, "they differ")

    asyncio.run(play())
    assert (desk.membership.stopped is None) == settles
    assert len(desk.happened(events.WentBack)) == 2


@pytest.mark.parametrize("shown_by", ["gradients", "states"])
def test_a_dispute_is_over_when_somebody_was_named(desk: Desk, shown_by: str) -> None:
    """The next one is another: the run goes on. Whose state was wrong the first time alone has
    spread to nobody since."""

    async def play() -> None:
        compared(desk, 9)
        if shown_by == "gradients":
            desk.corruption.take([desk.record(10, [usual(10), 1.5, usual(10)])])
        await desk.corruption.undecided(1, 14, "they differ")
        desk.regroup(14, generation=1)
        desk.take(8, 14)
        if shown_by == "states":
            await desk.corruption.outlier("b", 2, "it was the other", spread=False)
        await settled(desk)
        assert [lost.worker for lost in desk.happened(events.WorkerLost)] == ["b"]
        assert len(desk.happened(events.WentBack)) == 1
        desk.regroup(14, generation=2)
        await desk.corruption.undecided(3, 14, "they differ")

    asyncio.run(play())
    assert desk.membership.stopped is None
    assert len(desk.happened(events.WentBack)) == 2


def test_steps_that_are_confirmed_are_not_kept(desk: Desk) -> None:
    compared(desk, 13)
    assert list(desk.corruption._done) == [13]


def test_an_outlier_is_lost_and_all_go_back_behind_the_last_equal_comparison(desk: Desk) -> None:
    async def play() -> None:
        compared(desk, 8)  # a copy made after it may hold the error: 8 itself is in doubt
        compared(desk, 14, equal=False)
        await desk.corruption.outlier("b", 1, "it differs", spread=True)

    asyncio.run(play())
    (lost,) = desk.happened(events.WorkerLost)
    assert (lost.worker, lost.cause) == ("b", "corruption")
    assert {run.step for run in desk.regroup(14, generation=1).values()} == {4}


def test_all_go_back_where_an_outlier_dies_before_its_call(desk: Desk) -> None:
    """One who was right has said so as well; where both do, they go back once."""

    async def play(*, dies: bool) -> None:
        said = [desk.corruption.spread(1, "it differs")]
        if not dies:
            said.append(desk.corruption.outlier("b", 1, "it differs", spread=True))
        await asyncio.gather(*said)

    asyncio.run(play(dies=True))
    assert desk.happened(events.WorkerLost) == []
    asyncio.run(play(dies=False))
    assert [back.reason for back in desk.happened(events.WentBack)] == ["it differs"]
    assert [lost.worker for lost in desk.happened(events.WorkerLost)] == ["b"]


def test_those_who_say_it_at_once_take_all_back_once(desk: Desk) -> None:
    async def play() -> None:
        await asyncio.gather(*(desk.corruption.spread(1, "it differs") for _ in range(3)))

    asyncio.run(play())
    assert len(desk.happened(events.WentBack)) == 1


def test_an_outlier_of_an_earlier_roster_is_lost_and_nobody_goes_back(desk: Desk) -> None:
    """A call whose answer was lost comes once more, when all have gone back."""
    asyncio.run(desk.corruption.outlier("b", 0, "it differs", spread=True))
    assert [lost.worker for lost in desk.happened(events.WorkerLost)] == ["b"]
    assert desk.happened(events.WentBack) == []


@pytest.mark.parametrize("outlier", [True, False])
def test_a_run_that_goes_back_for_its_losses_goes_further_where_replicas_differ(
    make: Make, outlier: bool
) -> None:
    """The checkpoint before the spike was made after the last equal comparison."""
    desk = make(health(on_loss_spike="skip_data"))

    async def play() -> None:
        compared(desk, 5)
        desk.take(14, 17, losses={15: HIGH, 16: HIGH})
        await settled(desk)
        for _ in range(2):  # another slot says so, too
            if outlier:
                await desk.corruption.outlier("b", 1, "it differs", spread=True)
            else:
                await desk.corruption.undecided(1, 17, "they differ")
        assert desk.membership.stopped is None

    asyncio.run(play())
    assert [back.step for back in desk.happened(events.WentBack)] == [12, 4]
    runs = desk.regroup(17, generation=1).values()
    assert {(run.step, run.skips) for run in runs} == {(4, (Skip(15, 5),))}
    assert list_steps(desk.store, KEYS) == [4]


@pytest.mark.parametrize("compares", [True, False])
def test_what_is_sound_is_kept_before_anything_happens(desk: Desk, compares: bool) -> None:
    """What is saved after the end of a run still deletes others, and no event comes any more."""
    needed = desk.receipts._publisher.needed
    needed.clear()
    corruption = desk.judge(start_step=4, compares=compares)
    assert needed == ({"corruption": 4} if compares else {})
    corruption.replay([events.ReplicasCompared(time=0.0, step=9, equal=True)])
    assert needed == ({"corruption": 8} if compares else {})


def test_a_coordinator_started_anew_knows_what_was_confirmed(desk: Desk) -> None:
    """Or it would go back to the seed, from wherever the run is."""

    async def play() -> None:
        told = ((9, True), (14, False))
        desk.corruption.replay(
            events.ReplicasCompared(time=0.0, step=step, equal=equal) for step, equal in told
        )
        await desk.corruption.undecided(1, 14, "they differ")

    asyncio.run(play())
    assert {run.step for run in desk.regroup(14, generation=1).values()} == {8}


def test_a_comparison_of_what_was_given_up_says_nothing_of_what_is_done_again(
    desk: Desk,
) -> None:
    """It was queued when the run went back, and comes after the roster that did."""

    async def play() -> None:
        compared(desk, 9)
        await desk.retreat.go_back(at_most=7, reason="told", skip=Skip(6, 3))
        desk.regroup(14, generation=1)
        late = events.ReplicasCompared(time=0.0, step=13, equal=True, generation=1)
        desk.records.note(late)
        desk.take(4, 10)
        write_state(desk.store, {"w": torch.randn(4, 4)}, step=8)
        await desk.corruption.outlier("b", 2, "it differs", spread=True)

    asyncio.run(play())
    assert {run.step for run in desk.regroup(10, generation=2).values()} == {4}


def test_what_is_saved_after_the_run_went_back_is_not_confirmed_by_what_was_before(
    desk: Desk,
) -> None:
    async def play() -> None:
        compared(desk, 13)
        await desk.retreat.go_back(at_most=7, reason="told", skip=Skip(6, 3))
        desk.regroup(14, generation=1)
        desk.take(4, 10)
        write_state(desk.store, {"w": torch.randn(4, 4)}, step=8)
        await desk.corruption.outlier("b", 2, "it differs", spread=True)

    asyncio.run(play())
    assert [back.step for back in desk.happened(events.WentBack)] == [4, 4]


def test_checkpoints_that_retention_has_deleted_are_made_again_on_the_way_back(desk: Desk) -> None:
    async def play() -> None:
        compared(desk, 9)
        for step in (10, 11, 13):
            await save(desk, step, generation=1)
        assert list_steps(desk.store, KEYS) == [8, 12, 13], "two, and the one to go back to"
        await desk.retreat.go_back(at_most=8, reason="told")
        assert not desk.receipts.saved(10)
        desk.regroup(14, generation=1)
        desk.take(8, 11)
        await save(desk, 10, generation=2)

    asyncio.run(play())
    assert list_steps(desk.store, KEYS) == [8, 10]
    assert [e.step for e in desk.happened(events.CheckpointCommitted)] == [10, 11, 13, 10]


def test_where_what_there_is_to_go_back_to_cannot_be_read_the_run_ends(desk: Desk) -> None:
    async def play() -> None:
        for step in (4, 8):
            (desk.paths.root / "checkpoints" / KEYS.commit(step)).write_bytes(b"{")
        await desk.retreat.go_back(at_most=9, reason="told")

    asyncio.run(play())
    assert desk.membership.stopped is not None
    assert "those of steps [4, 8] cannot be read" in str(desk.membership.stopped.error)
    assert list_steps(desk.store, KEYS) == [4, 8, 12], "nothing was set aside"


# -- losses that stand out -------------------------------------------------------------------------

TRAINING = TrainingHealthConfig(window_steps=8, spike_steps=2, skip_steps=5, max_skips=2)
HIGH = [9.0, 9.0, 9.0]


def health(**actions: Any) -> HealthConfig:
    fields = {name: getattr(TRAINING, name) for name in vars(TRAINING)}
    return HealthConfig(training=TrainingHealthConfig(**{**fields, **actions}))


def test_a_spike_is_told_of_and_no_more_by_default(make: Make) -> None:
    desk = make(health())
    desk.take(14, 18, losses={15: HIGH, 16: HIGH})
    (found,) = desk.happened(events.TrainingTrouble)
    assert (found.trouble, found.first, found.last, found.action) == ("loss_spike", 15, 16, "warn")
    assert desk.membership.call is None and desk.membership.stopped is None


def test_a_spike_may_end_the_run(make: Make) -> None:
    desk = make(health(on_loss_spike="stop"))

    async def play() -> None:
        desk.take(14, 17, losses={15: HIGH, 16: HIGH})
        await settled(desk)

    asyncio.run(play())
    assert desk.membership.stopped is not None
    assert "on_loss_spike is 'stop'" in str(desk.membership.stopped.error)


@pytest.mark.parametrize("action", ["warn", "stop", "skip_data"])
def test_what_follows_from_a_spike_of_gradient_norms_is_its_own_to_say(
    make: Make, action: str
) -> None:
    """Also where the loss stands out in the same steps, which is only told of."""
    desk = make(health(on_norm_spike=action))

    async def play() -> None:
        desk.take(14, 17, losses={15: HIGH, 16: HIGH}, norms={15: 9.0, 16: 9.0})
        await settled(desk)

    asyncio.run(play())
    told = [(e.trouble, e.first, e.action) for e in desk.happened(events.TrainingTrouble)]
    assert told == [("loss_spike", 15, "warn"), ("norm_spike", 15, action)]
    stopped = desk.membership.stopped
    assert (stopped is not None) == (action == "stop")
    assert stopped is None or "on_norm_spike is 'stop'" in str(stopped.error)
    assert [e.skip for e in desk.happened(events.WentBack)] == [[15, 5]] * (action == "skip_data")


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_a_loss_that_does_not_fall_may_end_the_run(make: Make, action: str) -> None:
    desk = make(health(on_no_progress=action, progress_steps=12))

    async def play() -> None:
        # The window up to step 23 is held against that up to step 11.
        desk.take(14, 24, losses={step: [1.0, 1.0, 1.1] for step in range(14, 24)})
        await settled(desk)

    asyncio.run(play())
    (told,) = desk.happened(events.TrainingTrouble)
    assert (told.trouble, told.last, told.action) == ("no_progress", 23, action)
    stopped = desk.membership.stopped
    assert (stopped is not None) == (action == "stop")
    assert stopped is None or "on_no_progress is 'stop'" in str(stopped.error)


NAN = [math.nan] * 3


@pytest.mark.parametrize("action", ["warn", "stop", "skip_data"])
def test_what_follows_from_steps_that_are_not_finite_is_the_users_to_say(
    make: Make, action: str
) -> None:
    """With "stop" the workers end the run, which name the samples. Each stretch is told once, and
    the steps after it that were done before anybody heard are void."""
    desk = make(health(on_nonfinite=action))

    async def play() -> None:
        desk.take(14, 22, losses=dict.fromkeys(range(15, 21), NAN))  # five are too many
        await settled(desk)
        if action == "warn":
            desk.take(22, 27, losses=dict.fromkeys(range(22, 27), NAN))
            await settled(desk)

    asyncio.run(play())
    told = [(e.trouble, e.first, e.last, e.action) for e in desk.happened(events.TrainingTrouble)]
    stretches = [(15, 19), (22, 26)] if action == "warn" else [(15, 19)]
    assert told == [("nonfinite", first, last, action) for first, last in stretches]
    assert desk.membership.stopped is None
    back = [(e.step, e.skip) for e in desk.happened(events.WentBack)]
    assert back == ([(12, [15, 5])] if action == "skip_data" else [])
    assert desk.config.health.fatal_nonfinite_steps == (5 if action == "stop" else None)


def test_steps_that_are_not_finite_are_passed_over_so_often_and_no_oftener(make: Make) -> None:
    desk = make(health(on_nonfinite="skip_data", max_skips=1))

    async def play() -> None:
        desk.take(14, 20, losses=dict.fromkeys(range(15, 20), NAN))
        await settled(desk)
        runs = desk.regroup(20, generation=1)
        assert {(run.step, run.skips) for run in runs.values()} == {(12, (Skip(15, 5),))}
        desk.take(12, 20, losses=dict.fromkeys(range(15, 20), NAN))
        await settled(desk)

    asyncio.run(play())
    assert [e.first for e in desk.happened(events.TrainingTrouble)] == [15, 15]
    assert desk.membership.stopped is not None
    assert "passed over 1 times before" in str(desk.membership.stopped.error)


def test_what_steps_that_are_not_finite_go_back_to_is_kept(make: Make) -> None:
    """However many are saved while they come: their first is known with the fifth."""
    desk = make(health(on_nonfinite="skip_data"))

    async def play() -> None:
        desk.take(14, 19, losses=dict.fromkeys(range(15, 19), NAN))
        for step in (16, 17, 19):
            await save(desk, step, generation=1)
        desk.take(19, 20, losses={19: NAN})
        await settled(desk)

    asyncio.run(play())
    (back,) = desk.happened(events.WentBack)
    assert (back.step, back.skip) == (12, [15, 5]), "not the seed"


def test_data_are_passed_over_so_often_and_no_oftener(make: Make) -> None:
    desk = make(health(on_loss_spike="skip_data"))

    async def play() -> None:
        desk.take(14, 18, losses={15: HIGH, 16: HIGH})  # 17 is done before anybody hears
        await settled(desk)
        runs = desk.regroup(18, generation=1)
        assert {(run.step, run.skips) for run in runs.values()} == {(12, (Skip(15, 5),))}
        # The window is that of the steps before, although this coordinator went on to 18.
        desk.take(12, 17, losses={15: HIGH, 16: HIGH})
        await settled(desk)
        runs = desk.regroup(17, generation=2)
        assert runs["a"].skips == (Skip(15, 5), Skip(15, 5))
        desk.take(12, 17, losses={15: HIGH, 16: HIGH})
        await settled(desk)

    asyncio.run(play())
    first, *others = desk.happened(events.TrainingTrouble)
    assert [e.detail for e in others] == [first.detail] * 2, "held against the same steps"
    assert desk.membership.stopped is not None
    assert "passed over 2 times before" in str(desk.membership.stopped.error)


def test_what_a_spike_goes_back_to_is_kept_however_many_are_saved_since(make: Make) -> None:
    desk = make(health(on_loss_spike="skip_data"))

    async def play() -> None:
        desk.take(14, 16, losses={15: HIGH})
        for step in (14, 16, 17):  # the records come later
            await save(desk, step, generation=1)
        desk.take(16, 17, losses={16: HIGH})
        await settled(desk)

    asyncio.run(play())
    (back,) = desk.happened(events.WentBack)
    assert (back.step, back.skip) == (12, [15, 5]), "not the seed"


def test_what_a_spike_that_is_taken_up_goes_back_to_is_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are saved until the coordinator that was started anew has found it."""
    desk = make(health(on_loss_spike="skip_data"))
    saved, find = threading.Event(), Retreat._find

    def find_later(self: Retreat, at_most: int) -> tuple[int, list[int]]:
        assert saved.wait(PATIENCE_S)
        return find(self, at_most)

    monkeypatch.setattr(Retreat, "_find", find_later)
    due = events.TrainingTrouble(
        time=0.0, trouble="loss_spike", first=15, last=16, detail="high", action="skip_data"
    )

    async def play() -> None:
        desk.take(14, 17)
        await save(desk, 16, generation=1)
        desk.take(17, 20)  # what may be found after them goes back to 16 at most
        desk.training.take_up([due])
        await save(desk, 18, generation=1)
        saved.set()
        await settled(desk)

    asyncio.run(play())
    (back,) = desk.happened(events.WentBack)
    assert (back.step, back.skip) == (12, [15, 5]), "not the seed"


async def save(desk: Desk, step: int, generation: int) -> None:
    """A checkpoint that this coordinator commits."""
    row = TensorSlice("param/w", (1, 4), "uint8", (0, 0), (1, 4))
    attempt = Attempt(rank=0, step=step, generation=generation)
    await desk.receipts.take(
        write_shared(desk.store, KEYS, attempt, [row], memoryview(bytes(64))), {}, 0.0, 1
    )


def _receipt(step: int, generation: int) -> Receipt:
    slices: Any = None  # nobody looks at them
    return Receipt(rank=0, step=step, generation=generation, attempt=1, slices=slices, segments=())
