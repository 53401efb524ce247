"""Before a machine's workers get a place in a run: may they? Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.doctor.finding import Finding

_ACTS = frozenset({"GPU errors", "matrix burn", "all-reduce in the node"})
"""Checks whose ISOLATE keeps workers out. What a container was not given looks as if it were lost,
so the numbers of GPUs and of EFA devices are told, and no more; nor do lines of a log act."""


def decide_isolated(findings: Sequence[Finding]) -> str:
    """Why no worker may work on a machine; empty where they may."""
    return "; ".join(
        f"{one.check}: {one.result}"
        for one in findings
        if one.severity == "ISOLATE" and one.check in _ACTS
    )
