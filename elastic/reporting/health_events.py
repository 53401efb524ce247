"""Verdicts against machines as health events of NVIDIA's NVSentinel, for who runs the nodes. Pure.

The shape is that of its `HealthEvents` message (version 1) as JSON; enumerations by name. One event
for a fault of a machine. What the run itself has judged last counts: it knew what came again, what
was mended, and what has gone since. What its records show counts where it has judged nothing, or
where they show a later loss, or sign, that calls for more: the run may have ended before it judged
that. Source: NVSentinel, docs/DATA_FLOW.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, cast

from elastic.protocol.events import Event, NodeReplacement, SignsChanged, VerdictReached
from elastic.reporting.verdicts import Advice
from health.verdict import Confidence, Step, Verdict

KINDS = NodeReplacement, SignsChanged, VerdictReached
"""Of events, that are looked at here."""

_AGENT = "elastictrainer"

_ACTIONS: Mapping[Step, str] = {
    "reset_gpu": "RESTART_VM",
    "reboot": "RESTART_VM",
    "replace_node": "REPLACE_VM",
}
"""What NVSentinel is to do. The other steps are the run's own business. Its `COMPONENT_RESET` needs
the UUID of a GPU, which no verdict has: a reset is met by a reboot, as our providers do."""

_FROM_LEAST = "NONE", "RESTART_VM", "REPLACE_VM"
"""What it is to do, in order."""

_COMPONENTS = {"gpu_error": "GPU", "gpu_memory": "GPU", "link": "NIC", "network": "NIC"}
"""Cause -> the part that it is of; the whole node where it is not here."""

_MOST_EVIDENCE = 5
"""Lines in a message."""


def to_health_events(
    verdicts: Iterable[Advice], events: Sequence[Event], run: str
) -> dict[str, Any]:
    """The message, in the order of the verdicts. Verdicts against no machine are left out.

    Args:
        verdicts: of a run, made of its records.
        events: all of it: they tell what its nodes are called, and what it has judged itself.
        run: its name.
    """
    names, found = _names(events), list(verdicts)
    links = {(one.verdict.fingerprint, one.verdict.nodes): one.verdict.links for one in found}
    last = {(one.verdict.fingerprint, node): one for one in found for node in one.verdict.nodes}
    for event in events:
        if isinstance(event, VerdictReached):
            own = _advice_of(event, links.get((event.fingerprint, tuple(event.nodes)), ()))
            for node in event.nodes:
                key = event.fingerprint, node
                if key not in last or not _overrules(last[key], own):
                    last[key] = own
    return {
        "version": 1,
        "events": [
            _health_event(advice, names.get(node, node), node, run)
            for (_, node), advice in last.items()
        ],
    }


def _overrules(found: Advice, own: Advice) -> bool:
    """Whether what was found afterwards came later than the run's own verdict, and calls for
    more."""
    more = _FROM_LEAST.index(_action(found)) > _FROM_LEAST.index(_action(own))
    return more and found.time > own.time


def _advice_of(event: VerdictReached, links: tuple[str, ...]) -> Advice:
    verdict = Verdict(
        cause=event.cause,
        workers=tuple(event.workers),
        nodes=tuple(event.nodes),
        links=links,
        evidence=tuple(event.evidence),
        confidence=cast(Confidence, event.confidence),
        signs=tuple(event.fingerprint.split(":")[1:]),
    )
    return Advice(time=event.time, step=event.committed, verdict=verdict, remedy=event.step)


def _action(advice: Advice) -> str:
    return "NONE" if advice.remedy is None else _ACTIONS.get(advice.remedy, "NONE")


def _names(events: Sequence[Event]) -> dict[str, str]:
    """Ray's id of a node -> its machine: as its provider calls it, or else as it calls itself."""
    shown = {e.node: e.names[0] for e in events if isinstance(e, SignsChanged) and e.names}
    return shown | {e.node: e.machine for e in events if isinstance(e, NodeReplacement)}


def _health_event(advice: Advice, machine: str, node: str, run: str) -> dict[str, Any]:
    verdict = advice.verdict
    when = datetime.fromtimestamp(advice.time, tz=timezone.utc)
    action = _action(advice)
    return {
        "version": 1,
        "agent": _AGENT,
        "componentClass": _COMPONENTS.get(verdict.cause, "NODE"),
        "checkName": verdict.cause,
        "isFatal": action != "NONE",
        "isHealthy": False,
        "message": "\n".join(verdict.evidence[:_MOST_EVIDENCE]),
        "recommendedAction": action,
        "errorCode": list(verdict.signs),
        "entitiesImpacted": _entities(verdict, machine),
        "metadata": {
            "run": run,
            "step": str(advice.step),
            "ray_node": node,
            "confidence": verdict.confidence,
        },
        "generatedTimestamp": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "nodeName": machine,
        "quarantineOverrides": None,
        "drainOverrides": None,
    }


def _entities(verdict: Verdict, machine: str) -> list[dict[str, str]]:
    devices = [{"entityType": "LINK", "entityValue": link} for link in verdict.links]
    return [{"entityType": "NODE", "entityValue": machine}, *devices]
