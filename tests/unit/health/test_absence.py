"""Who has not arrived, by recordings as torch 2.13 makes them on Gloo, cut to what is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from health.absence import Absence, find_absences
from health.flight import LATEST, latest_of

GROUPS = {
    "all": ("0", "the replica replica/3"),
    "fsdp even": ("1", "mesh_fsdp replica/3"),
    "fsdp odd": ("2", "mesh_fsdp replica/3"),
    "tensor low": ("3", "mesh_tensor replica/3"),
    "tensor high": ("4", "mesh_tensor replica/3"),
    "across": ("first", "the group across replicas cross/7/0"),
    "across before": ("first", "the group across replicas cross/6/0"),
    "elsewhere": ("0", "the replica replica/5"),
    "unnamed": ("", ""),
}
PG_IDS = {group: number for number, group in enumerate(GROUPS)}
MESH = {"replica/3": ("w0", "w1", "w2", "w3")}
"""2 x 2: w0 and w2 are even, w0 and w1 are low."""


def entry(group: str, number: int, *, pending: bool = False, **other: Any) -> dict[str, Any]:
    return {
        "pg_id": PG_IDS[group],
        "process_group": [*GROUPS[group]],
        "profiling_name": "gloo:all_gather",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "input_sizes": [[4]],
        "retired": not pending,
        "state": "scheduled",
    } | other


def recording(*begun: tuple[str, int], waits: Sequence[tuple[str, int]] = ()) -> str:
    """Of a worker that has begun so many in these groups, and waits in those."""
    entries = [entry(group, n + 1) for group, count in begun for n in range(count)]
    entries += [entry(group, number, pending=True) for group, number in waits]
    return json.dumps({"version": "2.10", "entries": entries})


ONE = Absence(
    absent=("w3",),
    unheard=(),
    waiting=("w2",),
    what="all_gather",
    number=441,
    group="tensor",
    prefix="replica/3",
)


def test_of_a_mesh_each_group_is_for_itself() -> None:
    """w3 loops; w2 waits for it among tensor peers, and w0 and w1 wait for both."""
    found = find_absences(
        {
            "w0": recording(("tensor low", 3), ("fsdp even", 8), waits=[("fsdp even", 9)]),
            "w1": recording(("tensor low", 3), ("fsdp odd", 8), waits=[("fsdp odd", 9)]),
            "w2": recording(("tensor high", 2), ("fsdp even", 8), waits=[("tensor high", 3)]),
            "w3": recording(("tensor high", 2), ("fsdp odd", 8)),
        },
        MESH,
    )
    assert {(one.absent, one.waiting, one.group, one.number) for one in found} == {
        (("w3",), ("w2",), "tensor", 3),
        (("w2",), ("w0",), "fsdp", 9),
        (("w3",), ("w1",), "fsdp", 9),
    }


def test_numbers_of_a_like_group_in_another_replica_do_not_count() -> None:
    recordings = {
        "w0": recording(("all", 4), waits=[("all", 5)]),
        "w1": recording(("all", 5)),
        "v0": recording(("elsewhere", 1)),
    }
    assert find_absences(recordings, {**MESH, "replica/5": ("v0",)}) == ()


def test_of_one_worker_nothing_is_told_but_of_whom_nothing_was_heard() -> None:
    alone = {"w2": recording(("tensor high", 2), waits=[("tensor high", 3)])}
    assert find_absences(alone, MESH) == ()
    (found,) = find_absences({**alone, "w1": recording(("all", 1)), "w2": _in_all()}, MESH)
    assert (found.absent, found.unheard) == (("w1",), ("w0", "w3"))


def _in_all() -> str:
    return recording(("all", 1), waits=[("all", 2)])


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        pytest.param(recording(("across", 2)), ("w4",), id="it is behind"),
        pytest.param(recording(("across before", 9)), ("w4",), id="it has begun none there"),
        pytest.param(recording(("across", 3)), None, id="it is through"),
        pytest.param(recording(("across", 2), waits=[("across", 3)]), None, id="it is there"),
    ],
)
def test_a_group_made_by_hand(late: str, expected: tuple[str, ...] | None) -> None:
    """What has not ended in the one before it was given up at a regroup."""
    given_up = [("across before", 9), ("across before", 10)]
    waiter = recording(("across", 2), waits=[*given_up, ("across", 3)])
    found = find_absences({"w0": waiter, "w4": late}, {"cross/7/0": ("w0", "w4")})
    assert [one.absent for one in found] == ([expected] if expected else [])


def test_a_recording_that_has_wrapped_round_still_tells_of_a_group_seldom_used() -> None:
    """The entry that says so lies before the latest ones; the number is not counted from 1."""
    entries = [entry("tensor high", 440), *(entry("all", n) for n in range(900, 901 + LATEST))]
    assert len(json.loads(cut := latest_of(json.dumps({"entries": entries})))["entries"]) == (
        LATEST + 1
    )
    waiter = json.dumps({"entries": [entry("tensor high", 441, pending=True)]})
    assert find_absences({"w3": cut, "w2": waiter}, MESH) == (ONE,)


def test_the_first_collective_that_lacks_somebody_counts() -> None:
    """On the way are those that all have begun; others wait in several at once."""
    waiter = recording(("all", 2), waits=[("all", 3), ("all", 4), ("all", 5)])
    (found,) = find_absences({"w0": waiter, "w1": recording(waits=[("all", 3)])}, MESH)
    assert (found.number, found.absent, found.unheard) == (4, ("w1",), ("w2", "w3"))


def test_sends_unnamed_groups_and_what_is_no_recording_tell_nothing() -> None:
    p2p = json.dumps({"entries": [entry("all", 0, pending=True, is_p2p=True, p2p_seq_id=7)]})
    unnamed = recording(waits=[("unnamed", 3)])
    for text in (p2p, unnamed, "", "ValueError: no", "{}"):
        assert find_absences({"w0": text, "w1": recording(("all", 1))}, MESH) == ()


def test_who_has_not_arrived_is_told_in_words() -> None:
    assert str(ONE) == "w3 has not begun all_gather 441 of tensor, in which w2 waits"
    more = replace(ONE, absent=("w1", "w3"), waiting=("w0", "w2", "w4", "w5", "w6"))
    assert str(more) == (
        "w1 and w3 have not begun all_gather 441 of tensor, in which w0, w2, w4 and 2 more wait"
    )
