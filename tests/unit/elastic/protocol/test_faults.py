from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.protocol.faults import (
    Fault,
    FaultPlan,
    check_faults,
    parse_faults,
)
from trainer.errors import ConfigError
from trainer.loop.phases import PHASES


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("none", ()),
        ("kill@0", (Fault(step=0),)),
        ("kill@12:3", (Fault(step=12, workers=(3,)),)),
        ("kill@5:0, kill@7", (Fault(step=5, workers=(0,)), Fault(step=7))),
        (
            "freeze@6.in_commit:0+2",
            (Fault(kind="freeze", step=6, phase="in_commit", workers=(0, 2)),),
        ),
        ("kill@6:spare", (Fault(step=6, spare=True),)),
        (
            "raise@3.heal_source:1",
            (Fault(kind="raise", step=3, phase="heal_source", workers=(1,)),),
        ),
    ],
)
def test_what_the_user_writes(text: str, faults: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == faults


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("kill", "'kill'"),
        ("kill@", "'kill@'"),
        ("kill@-1", "'kill@-1'"),
        ("kill@2:", "'kill@2:'"),
        ("kill@2:1+", "'kill@2:1+'"),
        ("stop@3", "'stop@3'"),
        ("kill@1;kill@2", "'kill@1;kill@2'"),
        ("kill@1,none", "'none'"),
    ],
)
def test_what_is_not_understood_is_quoted(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(text)
    assert str(caught.value) == (
        f"fault = {text!r}: {part} is not understood. Write none or "
        f"KIND@STEP[.PHASE][:WORKER[+WORKER] or :spare], with KIND one of kill, freeze, raise, "
        f"flip, glitch, loop."
    )


def test_a_phase_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no phase 'backwards'") as caught:
        parse_faults("kill@3.backwards")
    named = caught.value.fix.removeprefix("Write one of ").split(", ")
    faults = parse_faults(",".join(f"kill@3.{phase}" for phase in named))
    check_faults(faults, steps=9, slots=1)  # nor is one named that is refused next


@settings(derandomize=True, deadline=None)
@given(
    st.lists(
        st.builds(
            Fault,
            kind=st.sampled_from(["kill", "freeze", "raise", "flip", "loop"]),
            step=st.integers(0, 10**6),
            phase=st.sampled_from(PHASES),
            workers=st.lists(st.integers(0, 10**4), max_size=3).map(tuple),
        ),
        min_size=1,
    )
)
def test_a_fault_is_written_as_it_is_read(faults: list[Fault]) -> None:
    assert parse_faults(",".join(map(str, faults))) == tuple(faults)


def test_the_last_slot_dies_where_none_is_named() -> None:
    assert Fault(step=1).targets(8) == (7,)
    assert Fault(step=1, workers=(0, 3)).targets(8) == (0, 3)
    assert Fault(step=1, spare=True).targets(8) == ()


def test_a_fault_is_due_from_its_step_on() -> None:
    (fault,) = parse_faults("kill@5.reduce")
    assert [fault.due(step, "reduce") for step in (4, 5, 6)] == [False, True, True]
    assert not fault.due(5, "forward")


def test_faults_of_one_step_come_one_after_the_other() -> None:
    plan = FaultPlan(parse_faults("kill@6:0,kill@6:1"), slots=2)
    assert not plan.claim(1, 1, generation=1), "the one before it has not fired"
    assert plan.claim(0, 0, generation=1)
    assert not plan.claim(0, 0, generation=2), "each fires once"
    assert not plan.claim(1, 1, generation=1), "the recovery comes first"
    assert not plan.claim(1, 1, generation=2, settled=False), "a replica has no state yet"
    assert plan.claim(1, 1, generation=3)


def test_workers_that_are_hit_together_fire_in_one_generation() -> None:
    plan = FaultPlan(parse_faults("kill@6:0+1"), slots=2)
    assert plan.claim(0, 0, generation=1) and not plan.fired(0)
    assert plan.claim(0, 1, generation=1, settled=False) and plan.fired(0)


def test_a_fault_in_the_recovery_fires_in_the_generation_of_the_one_before() -> None:
    plan = FaultPlan(parse_faults("kill@6:1,kill@6.build:1,kill@8:0"), slots=2)
    assert not plan.claim(1, 1, generation=1)
    assert plan.claim(0, 1, generation=1)
    assert plan.claim(1, 1, generation=1)
    assert plan.claim(2, 0, generation=2)


def test_a_spare_is_hit_once_the_step_is_committed() -> None:
    plan = FaultPlan(parse_faults("kill@6:spare"), slots=2)
    assert plan.claim_for_spares(6) == []
    assert plan.claim_for_spares(7) == [Fault(step=6, spare=True)]
    assert plan.claim_for_spares(8) == []


def test_what_fired_before_a_restart_does_not_fire_again() -> None:
    plan = FaultPlan(parse_faults("kill@6:0+1,kill@7"), slots=2)
    plan.count_as_fired(["kill@6:0+1"])
    assert plan.fired(0) and not plan.fired(1)


def test_a_fault_that_can_fire_passes() -> None:
    check_faults(parse_faults("kill@0,kill@9:3"), steps=10, slots=4)


@pytest.mark.parametrize(
    ("fault", "fact"),
    [
        ("kill@10", "the run has steps 0 to 9"),
        ("kill@3:4", "the layout has workers 0 to 3"),
        ("kill@3:1+4", "the layout has workers 0 to 3"),
        ("kill@3.wait", "a worker that waits has no slot"),
        ("raise@3:spare", "a spare has no code to disturb"),
    ],
)
def test_a_fault_that_could_never_fire_is_refused(fault: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        check_faults(parse_faults(fault), steps=10, slots=4)
