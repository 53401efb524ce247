"""When the lead asks for a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from checkpointing import CheckpointConfig
from elastic.worker.save_schedule import SaveSchedule


@dataclass
class Hand:
    """A clock that is set by hand."""

    s: float = 1000.0

    def __call__(self) -> float:
        return self.s


def auto_clock(hand: Hand) -> SaveSchedule:
    config = CheckpointConfig(
        every_steps="auto", auto_least_s=10, auto_most_s=200, auto_mtbf_s=10_000
    )
    return SaveSchedule(config, hand)


def test_it_goes_by_what_the_last_save_cost() -> None:
    hand = Hand()
    clock = auto_clock(hand)
    hand.s += 9
    assert not clock.wanted()
    hand.s += 1
    assert clock.wanted()
    clock.saved(held_s=0.5)  # the root of 2 * 0.5 * 10,000 is 100
    assert not clock.wanted()
    hand.s += 99
    assert not clock.wanted()
    hand.s += 2
    assert clock.wanted()


def test_losses_bring_the_next_save_forward() -> None:
    hand = Hand()
    clock = auto_clock(hand)
    clock.saved(held_s=0.5)
    for _ in range(99):
        clock.failed()
    hand.s += 10
    assert clock.wanted(), "a loss every 100 s: the root of 2 * 0.5 * 100"


def test_a_slow_save_is_not_followed_by_one_that_would_be_skipped() -> None:
    hand = Hand()
    clock = auto_clock(hand)
    clock.saved(held_s=0.0)
    hand.s += 150
    clock.written(write_s=150, held_s=0)
    assert clock.wanted()
    clock.saved(held_s=0.0)
    hand.s += 149
    assert not clock.wanted()


def test_the_wait_for_a_copy_counts() -> None:
    """The step after the save was held up by it."""
    hand = Hand()
    clock = auto_clock(hand)
    clock.saved(held_s=0.1)
    without_s = clock.interval_s()
    clock.written(write_s=0, held_s=0.3)
    assert clock.interval_s() == pytest.approx(2 * without_s)


def test_what_is_asked_for_is_wanted_until_it_is_saved() -> None:
    hand = Hand()
    clock = SaveSchedule(CheckpointConfig(every_steps=None), hand)
    hand.s += 1e9
    assert not clock.wanted(), "the clock does not count"
    clock.ask(True)
    assert clock.wanted() and clock.wanted()
    clock.saved(held_s=0.1)
    assert not clock.wanted()
