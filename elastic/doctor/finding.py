"""What a check says of a machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ISOLATE", "REBOOT", "RESET", "MONITOR", "OK"]

SEVERITIES: dict[Severity, str] = {
    "ISOLATE": "no run may use the machine; replace it",
    "REBOOT": "reboot the machine",
    "RESET": "put right what the fix names; runs fail until then",
    "MONITOR": "runs go on, perhaps slower; put it right when you can",
    "OK": "nothing to do",
}
"""Severity -> what to do, the worst first. Source: awslabs/awsome-distributed-training,
2.gpu-cluster-healthcheck."""


EXIT_STATUS: dict[Severity, int] = {"ISOLATE": 5, "REBOOT": 4, "RESET": 3, "MONITOR": 1, "OK": 0}
"""Of `elastic doctor`, by the worst severity. 2 is bad input, as of all its commands."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    """Its name."""
    result: str
    """What was found, with the numbers."""
    severity: Severity = "OK"
    """What it calls for."""
    meaning: str = ""
    """What comes of it; empty where nothing does."""
    fix: str = ""
    """What to do; empty where there is nothing to."""
    node: str = ""
    """The machine that it is about, or the pair of them; "": the one that this runs on."""

    def to_json(self) -> dict[str, str]:
        """For scripts."""
        return {
            **({"node": self.node} if self.node else {}),
            "check": self.check,
            "result": self.result,
            "severity": self.severity,
            "fix": self.fix,
        }


def worst_severity(severities: Iterable[Severity]) -> Severity:
    """The worst of them; "OK" of none."""
    return min(severities, key=list(SEVERITIES).index, default="OK")
