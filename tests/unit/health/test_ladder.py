from __future__ import annotations

import pytest

from health.ladder import EMPTY, decide_step
from health.signatures import Signature, known_signatures
from health.verdict import Confidence, Step, Verdict


def verdict(
    cause: str,
    remedy: Step | None = None,
    confidence: Confidence = "certain",
    node: str | None = "n1",
) -> Verdict:
    return Verdict(
        cause=cause,
        nodes=() if node is None else (node,),
        evidence=("seen",),
        confidence=confidence,
        signs=(cause,),
        remedy=remedy,
    )


def climb(found: Verdict, tries: int) -> list[Step | None]:
    """What is done each time the same fault comes back, with no step in between."""
    ledger, steps = EMPTY, []
    for _ in range(tries):
        steps.append(decide_step(found, ledger, 7))
        ledger = ledger.with_try(found.fingerprint, 7)
    return steps


@pytest.mark.parametrize(
    ("found", "steps"),
    [
        (
            verdict("crash"),
            ["new_process", "other_seat", "replace_node", "stop", "stop"],
        ),
        (verdict("collective"), ["retry", "new_process", "other_seat"]),
        (verdict("user_error"), ["new_process", "stop"]),
        (verdict("user_error", "replace_node"), ["new_process", "stop"]),
        (verdict("out_of_memory", node=None), ["new_process", "stop"]),
        # Some process of the machine was ended, and perhaps not this one.
        (
            verdict("out_of_memory", confidence="likely", node=None),
            ["new_process", "other_seat", "stop"],
        ),
        (verdict("gpu_error", "reset_gpu"), ["reset_gpu", "reboot", "replace_node", "stop"]),
        (verdict("gpu_error"), ["new_process", "other_seat", "reset_gpu", "reboot"]),
        (verdict("gpu_error", "retry"), ["new_process"]),  # no less than the cause asks for
        (verdict("node"), ["replace_node", "stop"]),
        (verdict("anothers_cause"), ["new_process", "other_seat"]),
        # No machine is at fault: none goes.
        (verdict("crash", node=None), ["new_process", "other_seat", "stop"]),
        (verdict("collective", node=None), ["retry", "new_process", "other_seat", "stop"]),
        # What is slow stops nobody.
        (verdict("slow", node=None), ["other_seat", "other_seat"]),
        (verdict("slow"), ["other_seat", "replace_node", "replace_node"]),
    ],
)
def test_each_time_more(found: Verdict, steps: list[Step | None]) -> None:
    assert climb(found, len(steps)) == steps


@pytest.mark.parametrize(
    "line", [line for line in known_signatures() if line.remedy], ids=lambda line: line.name
)
def test_no_line_asks_for_less_than_its_cause_gets(line: Signature) -> None:
    """It would not get it."""
    assert decide_step(verdict(line.cause, line.remedy), EMPTY, 7) == line.remedy


def test_nothing_is_done_for_a_weak_one() -> None:
    assert climb(verdict("gpu_error", "reboot", "weak"), 3) == [None] * 3
    assert climb(verdict("gpu_error", "reboot", "likely"), 1) == ["reboot"]


def test_a_step_of_progress_begins_anew() -> None:
    found = verdict("crash")
    ledger = EMPTY.with_try(found.fingerprint, 7).with_try(found.fingerprint, 7)
    assert (ledger.tries(found.fingerprint, 7), ledger.tries(found.fingerprint, 8)) == (2, 0)
    assert decide_step(found, ledger, 8) == "new_process"
    assert ledger.with_try(found.fingerprint, 8).tries(found.fingerprint, 8) == 1


def test_a_fault_that_moves_to_another_machine_is_the_same_and_another_is_not() -> None:
    ledger = EMPTY.with_try(verdict("crash").fingerprint, 7)
    assert decide_step(verdict("crash", node="n2"), ledger, 7) == "other_seat"
    assert decide_step(verdict("hang"), ledger, 7) == "new_process"
