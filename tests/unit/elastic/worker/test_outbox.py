"""What a worker keeps of the steps, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.protocol.events import StepRecord
from elastic.protocol.messages import Recorded, Run
from elastic.worker.outbox import Outbox


class Records:
    """A coordinator that knows steps alone, each once."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def call(self, _method: Any, steps: list[StepRecord], _happened: list[Any]) -> Recorded:
        for each in steps:
            if each.step == len(self.steps):
                self.steps.append(each.step)
        return Recorded(steps=len(self.steps), save_wanted=False)


def step(number: int) -> StepRecord:
    return StepRecord(
        step=number, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, time=0.0, generation=1,
        replicas=2, sample_digests=[1],
    )  # fmt: skip


def run(*, position: int, recorded: int = 0, restore: bool = False) -> Run:
    return Run(
        generation=1, replica=position, rank=0, position=position, formed=position + 1,
        lanes=((0,), (1,)), step=recorded, commit=None, heals=(), followers=(0,), restore=restore,
        source="store", recorded=recorded, until=9, skips=(), pause_s=0.0, meet=("h", 1), serial=1,
    )  # fmt: skip


@pytest.fixture
def pair() -> Iterator[tuple[Records, Outbox, Outbox]]:
    """The lead's outbox and another one's. Neither sends by itself."""
    records: Any = Records()
    lead, other = Outbox(records, lambda wanted: None), Outbox(records, lambda wanted: None)
    for outbox in (lead, other):
        outbox.close()
    lead.settle(run(position=0))
    other.settle(run(position=1))
    yield records, lead, other


def test_a_step_is_kept_until_the_lead_says_that_it_is_recorded(
    pair: tuple[Records, Outbox, Outbox],
) -> None:
    """Workers showed up to 500 steps each time they joined: 934 MB at 512 replicas of 512 lanes."""
    records, lead, other = pair
    for number in range(5):
        lead.step(step(number))
        other.step(step(number))
    other.let_go(lead.recorded)
    assert [s.step for s in other.recent()] == [0, 1, 2, 3, 4], "the lead may die with all of them"
    lead.flush()
    assert records.steps == [0, 1, 2, 3, 4] and lead.recorded == 5
    lead.step(step(5))
    other.step(step(5))
    other.let_go(lead.recorded)
    assert [s.step for s in other.recent()] == [s.step for s in lead.recent()] == [5]


def test_who_is_not_the_lead_says_nothing(pair: tuple[Records, Outbox, Outbox]) -> None:
    _, lead, other = pair
    lead.step(step(0))
    lead.flush()
    assert (lead.recorded, other.recorded) == (1, 0)
    lead.settle(run(position=1, recorded=1))
    other.settle(run(position=0, recorded=1))
    assert (lead.recorded, other.recorded) == (0, 1)


def test_steps_that_a_coordinator_does_not_take_are_not_recorded(
    pair: tuple[Records, Outbox, Outbox],
) -> None:
    records, lead, _ = pair
    lead.step(step(3))
    lead.flush()
    assert records.steps == [] and lead.recorded == 0


def test_a_run_that_went_back_keeps_nothing(pair: tuple[Records, Outbox, Outbox]) -> None:
    _, _, other = pair
    other.step(step(0))
    other.settle(run(position=1, restore=True))
    assert other.recent() == ()


def test_no_step_is_lost_while_the_coordinator_is_away() -> None:
    """Its machine may be for two minutes: 12,000 steps of 10 ms."""

    sizes = list[int]()

    class Away(Records):
        def call(self, method: Any, steps: list[StepRecord], happened: list[Any]) -> Recorded:
            sizes.append(len(steps))
            if len(steps) == 1:
                for number in range(1, 12_000):
                    outbox.step(step(number))
            return super().call(method, steps, happened)

    records: Any = Away()
    outbox = Outbox(records, lambda wanted: None)
    outbox.close()
    outbox.settle(run(position=0))
    outbox.step(step(0))
    outbox.flush()
    outbox.flush()
    assert len(records.steps) == 12_000 and outbox.recent() == ()
    assert max(sizes) == 1000, "each has a digest for each lane, and the coordinator other calls"
