"""Weak evidence that comes again within a window counts as likely. Pure.

One alarm of an instrument may be anything; the second of the same machine within minutes is not.
Lines of logs alone stay weak, however often they come. Source: ByteRobust (arXiv 2509.16293), which
evicts on two network alarms within five minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from health.verdict import Sign, Verdict

AGAIN_S = 300.0
"""Two that are further apart have nothing to do with each other."""


class Recurrence:
    """Which weak verdicts there were, and when."""

    def __init__(self) -> None:
        self._seen_s: dict[tuple[str, tuple[str, ...]], float] = {}

    def weigh(self, verdict: Verdict, signs: Iterable[Sign], now_s: float) -> Verdict:
        """The verdict, or where it came before within `AGAIN_S`, a stronger one. To be asked once
        each time that it comes up.

        Args:
            verdict: what is wrong.
            signs: those of its incident.
            now_s: now; any clock, but always the same.
        """
        measured = any(s.source != "log" and s.name in verdict.signs for s in signs)
        if verdict.confidence != "weak" or not measured:
            return verdict
        key = verdict.fingerprint, verdict.nodes
        before_s = self._seen_s.get(key)
        self._seen_s = {k: s for k, s in self._seen_s.items() if now_s - s <= AGAIN_S}
        self._seen_s[key] = now_s
        if before_s is None or now_s - before_s > AGAIN_S:
            return verdict
        return replace(verdict, confidence="likely")
