"""What is saved between two steps follows from the last commit, so all workers do the same."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.loop.between_steps import plan_saves
from trainer.loop.link import LoopConfig, Progress
from trainer.replication.step_commit import Commit, Saving

STEPS = 100


def plan(step: int, saving: Saving, **every: Any) -> tuple[list[str], list[str]]:
    commit = Commit(
        step=step - 1, loss=1.0, grad_norm=1.0, tokens=1, digests=b"", boundary=False, saving=saving
    )
    config = LoopConfig(
        **{"save_every": 10, "snapshot_every": 4, **every},
        lanes=1,
        compare_every=None,
        max_nonfinite_steps=1,
        until=STEPS,
    )
    places, skipped = plan_saves(Progress(step=step, last=commit), config)
    return list(places), list(skipped)


WANTED = Saving(wanted=True)
STORE_BUSY = Saving(busy=frozenset({"store"}))


@pytest.mark.parametrize(
    ("step", "saving", "expected"),
    [
        (7, Saving(), ([], [])),
        (10, Saving(), (["store"], [])),
        (12, Saving(), (["memory"], [])),
        (20, Saving(), (["store", "memory"], [])),
        (20, STORE_BUSY, (["memory"], ["store"])),
        (20, Saving(busy=frozenset({"store", "memory"})), ([], ["store", "memory"])),
        (7, WANTED, (["store"], [])),
        (12, WANTED, (["store", "memory"], [])),
        (10, WANTED, (["store"], [])),
        (7, Saving(wanted=True, busy=frozenset({"store"})), ([], [])),  # and asked for again
        (STEPS, STORE_BUSY, (["store"], [])),  # waits
    ],
)
def test_what_is_due(step: int, saving: Saving, expected: Any) -> None:
    assert plan(step, saving) == expected


def test_without_a_fixed_interval_only_what_is_asked_for() -> None:
    assert plan(10, Saving(), save_every=None, snapshot_every=None) == ([], [])
    assert plan(10, WANTED, save_every=None, snapshot_every=None) == (["store"], [])
