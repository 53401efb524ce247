"""What a run has against machines, for NVSentinel. The shape is tested with `elastic nodes`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from elastic.protocol.causes import NODE
from elastic.protocol.events import (
    Event,
    NodeReplacement,
    SignsChanged,
    VerdictReached,
    WorkerJoined,
    WorkerLost,
)
from elastic.reporting.health_events import to_health_events
from elastic.reporting.incidents import find_incidents
from elastic.reporting.verdicts import find_verdicts
from health.verdict import Sign, Step

SWITCH = Sign(
    name="sxid_fatal",
    source="log",
    role="root",
    cause="gpu_error",
    subject="link",
    of="0000:c5:00.0",
    detail="SXid 20034, Fatal",
    node="B",
)
JOINED = [
    WorkerJoined(time=1.0, worker=worker, node=node, pid=1, born_ticks=None)
    for worker, node in (("a", "A"), ("b", "B"), ("c", "C"))
]
REPLACED = NodeReplacement(
    time=131.0, node="B", machine="i-9", outcome="replaced", reason="gpu_error: r", detail=""
)


def shows(time: float, *signs: Sign) -> SignsChanged:
    shown = [sign.to_json() for sign in signs]
    return SignsChanged(time=time, node="B", names=["ip-9"], signs=shown)


def judged(time: float, step: Step, *nodes: str) -> VerdictReached:
    return VerdictReached(
        time=time,
        cause="gpu_error",
        workers=["b"],
        nodes=list(nodes),
        evidence=["as the run saw it"],
        confidence="likely",
        fingerprint="gpu_error:sxid_fatal",
        committed=9,
        step=step,
        outcome="taken",
        detail="",
    )


def exported(*happened: Event) -> list[dict[str, Any]]:
    events = [*JOINED, *happened]
    found = find_verdicts(events, [], find_incidents(events, []))
    told: list[dict[str, Any]] = to_health_events(found, events, "r")["events"]
    return told


def test_what_the_run_itself_has_judged_last_counts() -> None:
    """It knew that a sign came again: alone the sign is weak, and nothing is due."""
    shown = shows(100.0, SWITCH)
    (weak,) = exported(shown)
    assert (weak["recommendedAction"], weak["metadata"]["confidence"]) == ("NONE", "weak")
    met = judged(121.0, "reboot", "B"), judged(125.0, "replace_node", "B")
    (one,) = exported(shown, *met, REPLACED)
    assert one["recommendedAction"] == "REPLACE_VM" and one["isFatal"] is True
    assert (one["nodeName"], one["message"]) == ("i-9", "as the run saw it")
    assert one["errorCode"] == ["sxid_fatal"]
    assert one["generatedTimestamp"] == "1970-01-01T00:02:05.000Z"
    assert one["metadata"] == {"run": "r", "step": "9", "ray_node": "B", "confidence": "likely"}
    assert one["entitiesImpacted"][1] == {"entityType": "LINK", "entityValue": "0000:c5:00.0"}


def test_so_it_does_where_the_machine_shows_nothing_any_more() -> None:
    shown = shows(100.0, SWITCH), shows(130.0)
    assert exported(*shown) == []
    (one,) = exported(*shown, judged(121.0, "reboot", "B"), REPLACED)
    assert (one["nodeName"], one["recommendedAction"]) == ("i-9", "RESTART_VM")
    assert exported(*shown, judged(121.0, "new_process")) == [], "against no machine"


def test_a_later_loss_that_calls_for_more_counts_over_it() -> None:
    """The run may have ended before it judged that. What calls for less it has met already."""
    gone = WorkerLost(
        time=200.0, worker="b", node="B", pid=1, slot=None, cause=NODE, detail="it is silent"
    )
    (alone,) = exported(gone)
    assert (alone["checkName"], alone["recommendedAction"]) == ("node", "REPLACE_VM")
    for judged_s, step, action, when in [
        (190.0, "other_seat", "REPLACE_VM", "03:20"),
        (190.0, "reboot", "REPLACE_VM", "03:20"),
        (190.0, "replace_node", "REPLACE_VM", "03:10"),
        (220.0, "other_seat", "NONE", "03:40"),
    ]:
        own = replace(
            judged(judged_s, cast(Step, step), "B"), cause="node", fingerprint="node:node"
        )
        (one,) = exported(gone, own)
        assert one["recommendedAction"] == action
        assert one["generatedTimestamp"] == f"1970-01-01T00:{when}.000Z"


def test_a_sign_that_machines_tell_of_again_takes_nothing_from_it() -> None:
    """Alone it is weak."""
    own = judged(125.0, "replace_node", "B")
    (one,) = exported(shows(100.0, SWITCH), own, shows(130.0, SWITCH))
    assert one["recommendedAction"] == "REPLACE_VM"


@pytest.mark.parametrize(
    ("step", "action"),
    [
        ("other_seat", "NONE"),
        ("reset_gpu", "RESTART_VM"),  # what is reset would have to be named, and nobody does it
        ("reboot", "RESTART_VM"),
        ("replace_node", "REPLACE_VM"),
    ],
)
def test_what_is_recommended_is_what_our_own_providers_do(step: Step, action: str) -> None:
    (one,) = exported(judged(121.0, step, "B"))
    assert (one["recommendedAction"], one["isFatal"]) == (action, action != "NONE")
