"""Who keeps the others, from the places of all."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from health.progress import SOON, Place, Standstill, bound_s, find_standstill

LEAST_S, SHARED_S = 4.5, 300.0
STEPS_S = [0.2] * 10


def place(phase: str = "forward", in_phase_s: float = 6.0, **changes: object) -> Place:
    at = Place(
        mark=7,
        phase=f"phase {phase} of step 3",
        in_phase_s=in_phase_s,
        bound="pace",
        waits=phase == "reduce",
        collectives=40,
        longest_s=0.0,
    )
    return replace(at, **changes)  # type: ignore[arg-type]


def suspects(*replicas: dict[str, Place | None], share: float = 1.0) -> list[str]:
    return [suspect.worker for suspect in standstill(*replicas, share=share).suspects]


def standstill(
    *replicas: dict[str, Place | None],
    share: float = 1.0,
    single_s: float = inf,
    patience: float = 1.0,
) -> Standstill:
    return find_standstill(
        replicas,
        LEAST_S,
        STEPS_S,
        share=share,
        shared_s=SHARED_S,
        single_s=single_s,
        patience=patience,
    )


def test_the_one_that_waits_for_nobody_keeps_the_others() -> None:
    assert suspects({"a": place("reduce")}, {"b": place("backward")}) == ["b"]


def test_of_a_replica_the_one_that_has_begun_fewer_collectives() -> None:
    found = standstill(
        {"a": place(collectives=41), "b": place(collectives=40)}, {"c": place("reduce")}
    )
    assert [suspect.worker for suspect in found.suspects] == ["b"]
    assert "has begun 40 collectives" in found.suspects[0].evidence


def test_all_of_a_replica_where_nothing_tells_them_apart() -> None:
    assert suspects({"a": place(), "b": place()}, {"c": place("reduce")}) == ["a", "b"]


def test_a_replica_in_which_one_has_just_moved_is_left_alone() -> None:
    assert suspects({"a": place(in_phase_s=1.0), "b": place()}, {"c": place("reduce")}) == []


def test_a_phase_round_the_steps_may_take_long() -> None:
    waits, saves = place("reduce"), place("checkpoint", 60.0, bound="shared")
    assert standstill({"a": waits}, {"b": saves}) == Standstill(), "its connections are good"
    assert suspects({"a": waits}, {"b": replace(saves, in_phase_s=301.0)}) == ["b"]
    compiles = place("compile", 1e6, bound=None)
    assert suspects({"a": waits}, {"b": compiles}) == []


def test_who_is_done_waits_for_the_others() -> None:
    """At the end of the run: nobody else would find who hangs in the last evaluation."""
    done = place("wait", bound=None, waits=True)
    assert suspects({"a": done}, {"b": place("evaluation")}) == ["b"]
    new = place("evaluation", bound="shared")
    assert suspects({"a": done}, {"b": new}) == []
    assert suspects({"a": done}, {"b": replace(new, in_phase_s=301.0)}) == ["b"]
    assert not standstill({"a": done}, {"b": done}).all_wait, "they wait for the run's end"


def test_while_somebody_comes_the_others_may_take_longer() -> None:
    """The source of its state may copy that for long, where no step waited for it before."""
    new, source = place("data", bound="shared"), place("optimizer")
    assert suspects({"a": source}, {"b": place("reduce")}, {"c": new}) == []
    later = replace(source, in_phase_s=301.0)
    assert suspects({"a": later}, {"b": place("reduce")}, {"c": new}) == ["a"]


def test_who_comes_back_last_from_what_was_shared_has_its_time() -> None:
    """A storage answers again, and one replica reads on two seconds after the others."""
    waits, late = place("reduce"), place("data", in_phase_s=20.0)
    found = standstill({"a": late}, {"b": late}, {"c": waits})
    assert found.shared and not found.suspects
    found = standstill({"a": waits}, {"b": late}, {"c": waits}, single_s=2.0)
    assert not found.shared and not found.suspects
    found = standstill({"a": waits}, {"b": late}, {"c": waits}, single_s=LEAST_S + 0.1)
    assert [suspect.worker for suspect in found.suspects] == ["b"]


def test_where_somebody_is_not_heard_of_the_others_may_take_longer() -> None:
    """It may be anywhere, such as in what the source of its state copies that for."""
    waits, unheard = place("reduce"), {"a": None, "d": place(in_phase_s=1e6)}
    assert suspects(unheard, {"b": place()}) == []
    found = standstill(unheard, {"b": place()}, {"c": waits})
    assert not found.suspects and found.standing == ("b",), "its connections may fail"
    long = place(in_phase_s=SHARED_S + 1)
    assert suspects(unheard, {"b": long}, {"c": waits}) == ["b"]
    waits = place("reduce", SHARED_S + 1)
    assert not standstill(unheard, {"b": waits}, {"c": waits}).all_wait
    assert suspects(unheard) == []


def test_a_worker_that_was_slow_before_has_longer() -> None:
    slow = place(longest_s=4.0)
    assert suspects({"a": place("reduce")}, {"b": slow}) == []
    assert suspects({"a": place("reduce")}, {"b": replace(slow, in_phase_s=8.1)}) == ["b"]


def test_suspected_sooner_than_accused() -> None:
    soon = place(in_phase_s=3.0)
    assert suspects({"a": place("reduce")}, {"b": soon}) == []
    assert suspects({"a": place("reduce")}, {"b": soon}, share=SOON) == ["b"]


def test_all_wait_for_each_other() -> None:
    waits = place("reduce")
    found = standstill({"a": waits}, {"b": waits})
    assert found.all_wait and not found.suspects
    found = standstill({"a": waits}, {"b": replace(waits, in_phase_s=1)})
    assert not found.all_wait


@pytest.mark.parametrize(
    ("reduces_in_s", "calls"), [(4.4, 0), (5.0, 1), (17.0, 2), (299.0, 7), (inf, 8)]
)
def test_a_reduction_that_is_slow_for_good_comes_to_its_end(
    reduces_in_s: float, calls: int
) -> None:
    """All are called at the usual bound first, and later each time."""
    called_s: list[float] = []
    while len(called_s) < 8:
        waits_s = (seconds / 10 for seconds in range(10_000))
        now = next(s for s in waits_s if s >= reduces_in_s or all_wait(s, 2.0 ** len(called_s)))
        if now >= reduces_in_s:
            break
        called_s.append(now)
    assert len(called_s) == calls
    assert called_s == [4.6, 9.1, 18.1, 36.1, 72.1, 144.1, 288.1, SHARED_S + 0.1][:calls]


def all_wait(for_s: float, patience: float) -> bool:
    waits = place("reduce", for_s)
    return standstill({"a": waits}, {"b": waits}, patience=patience).all_wait


def test_the_bound_follows_the_steps() -> None:
    assert bound_s(4.5, [0.2, 0.3, 9.0]) == 4.5
    assert bound_s(4.5, [4.0, 5.0, 60.0]) == 15.0
    assert bound_s(4.5, [0.2], longest_s=30.0) == 60.0


def test_what_most_have_in_common_is_not_their_fault() -> None:
    """As where the storage that all read does not answer."""
    waits, slow = place("reduce"), place("data")
    assert suspects({"a": slow}, {"b": slow}) == []
    assert suspects({"a": slow}, {"b": slow}, {"c": waits}) == []
    assert suspects({"a": slow}, {"b": waits}, {"c": waits}) == ["a"]
    assert suspects({"a": slow, "b": slow}) == []
    for_ever = place("data", in_phase_s=301.0)
    assert suspects({"a": for_ever}, {"b": for_ever}) == ["a", "b"]


def test_in_a_single_replica_one_may_keep_the_others() -> None:
    assert suspects({"a": place(collectives=41), "b": place(collectives=40)}) == ["b"]


def test_who_waits_for_a_mate_that_waits_for_other_replicas_keeps_nobody() -> None:
    """The sum of one column hangs; the other ranks wait for theirs inside their replicas."""
    waits, after = place("reduce"), place("before_commit", collectives=41)
    found = standstill({"a": after, "b": waits}, {"c": after, "d": waits})
    assert found.all_wait and not found.suspects and not found.standing
    loops = place("before_commit")
    assert suspects({"a": after, "b": waits}, {"c": loops, "d": waits}) == ["c"]
    assert suspects({"a": loops, "b": after}, {"c": waits, "d": waits}) == ["a"]


def test_where_most_stand_still_they_are_told_without_being_accused() -> None:
    found = standstill({"a": place(), "b": place()}, {"c": place(), "d": place()})
    assert not found.suspects and not found.all_wait
    assert found.standing == ("a", "b", "c", "d")
