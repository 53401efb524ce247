"""Which state is gone on from, of those that the living hold, and by whom."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.membership.conclusion import decide_step, find_staying
from elastic.membership.reassembly import find_copy
from elastic.protocol.messages import Identity, Report
from elastic.protocol.roster import Replica
from tests.support.simulated_worker import make_commit as commit

FIRST = Replica(index=0, formed=1, workers=("a0", "b1"))
SECOND = Replica(index=1, formed=2, workers=("c2", "d3"))


def report(worker: str, step: int, *, generation: int = 1, **more: Any) -> Report:
    """Of one that is at `step`, and saw the one before it committed in `generation`."""
    identity = Identity(worker=worker, rank=int(worker[1:]), node="n", pid=1)
    return Report(
        identity=identity,
        rank=int(worker[1:]) % 2,
        step=step,
        generation=generation,
        last=commit(step - 1, generation=generation),
        **more,
    )


def names(reports: list[Report]) -> list[str]:
    return [each.identity.worker for each in reports]


@pytest.mark.parametrize(("step", "whole"), [(8, True), (7, False)])
def test_a_whole_copy_may_be_one_step_behind_the_furthest_and_no_more(
    step: int, whole: bool
) -> None:
    """Of a step that two have passed all who went on hold more: what is older is of one that had
    left long ago, and the steps since are in the records."""
    reports = [report("a0", 9), report("c2", step), report("d3", step)]
    assert names(find_copy(reports, 2, since=0)) == (["c2", "d3"] if whole else [])


@pytest.mark.parametrize(("recorded", "stays"), [(7, True), (8, True), (9, False)])
def test_a_replica_stays_where_at_most_the_latest_record_is_ahead_of_it(
    recorded: int, stays: bool
) -> None:
    """The lead may have shown a step, and have died with all who saw its commit."""
    reports = [report("a0", 7), report("b1", 7)]
    staying, holders = find_staying(reports, [FIRST], since=0, recorded=recorded)
    assert staying == ([FIRST] if stays else [])
    assert names(holders) == (["a0", "b1"] if stays else [])


def test_one_whose_replica_broke_holds_nobody_to_what_it_alone_has_seen() -> None:
    """a0 saw step 7 committed in generation 1; the others did it once more in generation 2, in
    which they may have come to other bits."""
    repeating = [report(w, 7, in_step=True, generation=2) for w in SECOND.workers]
    staying, holders = find_staying([report("a0", 8), *repeating], [SECOND], since=0, recorded=7)
    assert (staying, names(holders)) == ([SECOND], ["c2", "d3"])


@pytest.mark.parametrize(("begun", "outcome"), [(0, "boundary"), (1, "repeat"), (2, "repeat")])
def test_a_step_is_repeated_where_anybody_has_begun_it(begun: int, outcome: str) -> None:
    reports = [report(w, 7, in_step=at < begun) for at, w in enumerate(FIRST.workers)]
    found = decide_step(reports, stored=4, first=False)
    assert (found.step, found.outcome, found.commit) == (7, outcome, commit(6))
