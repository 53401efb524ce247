"""A checkpoint is wanted once all that is left of the state is on machines that will go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing import CheckpointConfig
from elastic.coordinator import actor
from elastic.coordinator.actor import Coordinator
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.save_wish import SaveWish
from elastic.membership.decisions import Effects, Outcome, Regrouped
from elastic.protocol import events
from elastic.protocol.causes import CRASH
from elastic.protocol.roster import Roster
from elastic.reporting.event_log import read_events
from tests.support.coordinator_desk import CoordinatorDesk
from trainer.replication.step_commit import Saving

CUT_OFF = events.RegroupDone(
    time=1.0,
    generation=2,
    step=4,
    replicas=1,
    lanes={"0": [0]},
    renumbered={},
    outcome="finish_step",
    lost_steps=0,
    repeated_steps=0,
    save_cut_off=True,
)


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_a_loss_that_makes_them_the_last_asks_as_a_notice_does(tmp_path: Path) -> None:
    desk = CoordinatorDesk(tmp_path)
    progress, wish = desk.membership.progress, SaveWish(desk.membership)

    async def scene() -> None:
        progress.record(3)
        desk.workers.retire(["a"], dismiss=False)
        await desk.workers.lose("b", CRASH, "its process ended")
        assert not wish.wanted(), "c stays"
        await desk.workers.lose("c", CRASH, "its process ended")
        assert wish.wanted()

    play(scene())


def test_it_is_asked_for_until_one_is_committed(tmp_path: Path) -> None:
    """Who writes it may be lost, and so may whoever was told."""
    desk = CoordinatorDesk(tmp_path)
    progress, wish = desk.membership.progress, SaveWish(desk.membership)

    async def scene() -> None:
        progress.record(3)
        progress.checkpointed(3)
        desk.workers.retire(["a", "b", "c"], dismiss=False)
        assert wish.wanted() and wish.wanted()
        progress.record(4)
        await desk.workers.lose("c", CRASH, "its process ended")
        assert wish.wanted()
        progress.checkpointed(4)
        assert not wish.wanted(), "nothing is lost but what was done since"
        progress.record(5)
        assert not wish.wanted(), "once is enough"

    play(scene())


@pytest.mark.parametrize("back", [False, True])
def test_a_checkpoint_that_a_regroup_cuts_off_is_asked_for(tmp_path: Path, back: bool) -> None:
    desk = CoordinatorDesk(tmp_path)
    progress, wish = desk.membership.progress, SaveWish(desk.membership)
    progress.record(3)
    wish.hear(CUT_OFF)
    assert wish.wanted()
    progress.checkpointed(3)
    assert wish.wanted()
    if back:
        wish.hear(replace(CUT_OFF, outcome="restore", save_cut_off=False))
    else:
        progress.checkpointed(5)
    assert not wish.wanted()


def test_a_store_that_refuses_gets_no_save_after_save(tmp_path: Path) -> None:
    """Each leaves its parts there: they would fill it."""
    desk, clock = CoordinatorDesk(tmp_path), [0.0]
    progress, wish = desk.membership.progress, SaveWish(desk.membership, lambda: clock[0])
    progress.record(3)
    desk.workers.retire(["a", "b", "c"], dismiss=False)
    wish.hear(CUT_OFF)
    asked = []
    for second in range(200):
        clock[0] = float(second)
        if wish.wanted():
            asked.append(second)
            wish.failed(5)
    assert asked == [0, 30, 90]
    progress.checkpointed(3)
    assert not wish.wanted(), "another one, which was due, has come through"


def test_a_save_that_fails_counts_once_however_many_wrote_it(tmp_path: Path) -> None:
    desk, clock = CoordinatorDesk(tmp_path), [0.0]
    wish = SaveWish(desk.membership, lambda: clock[0])
    receipts = Receipts(desk.config, desk.membership, desk.dispatcher, desk.records, wish)

    async def scene() -> None:
        desk.membership.progress.record(3)
        desk.workers.retire(["a", "b", "c"], dismiss=False)
        for step, again_s in ((4, 30.0), (5, 90.0)):
            assert wish.wanted()
            for writer in range(8):
                await receipts.failed(step, 1, f"part {writer}: 503")
            clock[0] = again_s - 1
            assert not wish.wanted()
            clock[0] = again_s

    play(scene())
    assert [event.step for event in desk.happened(events.CheckpointSkipped)] == [4, 5]


@pytest.mark.parametrize(("failed", "wanted"), [(3, True), (4, True), (5, False)])
def test_what_makes_up_for_one_that_is_cut_off_is_asked_for_until_it_fails_itself(
    tmp_path: Path, failed: int, wanted: bool
) -> None:
    """The one before it may fail late, and so may that of which parts are there."""
    desk, clock = CoordinatorDesk(tmp_path), [0.0]
    wish = SaveWish(desk.membership, lambda: clock[0])
    desk.membership.progress.record(3)
    wish.hear(CUT_OFF)
    wish.failed(failed)
    clock[0] = 30.0
    assert wish.wanted() == wanted


@pytest.mark.parametrize(
    ("outcome", "step", "saving", "wanted"),
    [
        ("finish_step", 20, Saving(), True),
        ("finish_step", 21, Saving(), False),
        ("finish_step", 21, Saving(wanted=True), True),
        ("finish_step", 20, Saving(busy=frozenset({"store"})), False),
        ("finish_step", 20, Saving(busy=frozenset({"memory"})), True),
        ("repeat", 20, Saving(), False),
        ("boundary", 20, Saving(), False),
    ],
)
def test_who_saw_a_commit_and_who_finishes_it_later_save_in_different_rosters(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome,
    step: int,
    saving: Saving,
    wanted: bool,
) -> None:
    """Neither attempt is ever complete: the one that was due is made up for, unless all skipped it
    for one that was still being written."""
    monkeypatch.setattr(actor, "started_anew", lambda: False)
    config = replace(CoordinatorDesk(tmp_path).config, checkpoint=CheckpointConfig(every_steps=10))
    regrouped = Regrouped(
        roster=Roster(generation=2, replicas=(), lanes={}),
        step=step,
        outcome=outcome,
        saving=saving,
        lost_steps=0,
        renumbered={},
    )

    async def scene() -> None:
        coordinator = Coordinator(config)
        effects = Effects(regrouped=regrouped)
        coordinator._carry_on(effects)
        coordinator._records.write_down(effects)
        answer = await coordinator.record([], [])
        assert answer.save_wanted == wanted
        await coordinator.end("finished", None)

    play(scene())
    told = read_events(config.paths.events)
    (done,) = (event for event in told if isinstance(event, events.RegroupDone))
    assert done.save_cut_off == wanted, "the next coordinator must know"
