"""From verdicts to what to do: the least that can help, and more each time it did not. Pure.

    retry ─► new process ─► other seat ─► reset GPU ─► reboot ─► replace node ─► stop

A fault that comes back with no step committed in between takes the next rung that can help against
its cause. An error of the user's code is no better on another machine: it has a new process, and
then the run stops. A machine is mended or replaced only where the verdict names it: a fault that
follows the work from one to the next is none of theirs. What is slow stops nobody.
Source: the retry ledgers of nvidia-resiliency-ext's restart agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from health.verdict import STEPS, Step, Verdict

_FIRST: dict[str, Step] = {
    "collective": "retry",
    "crash": "new_process",
    "hang": "new_process",
    "user_error": "new_process",
    "out_of_memory": "new_process",
    "gpu_error": "new_process",
    "corruption": "other_seat",
    "slow": "other_seat",
    "link": "other_seat",
    "preemption": "other_seat",
    "node": "replace_node",
}
"""Cause -> the rung to begin with, where the evidence asks for nothing more; a cause that is not
here is met as a crash."""

_ONLY_CODE = frozenset({"user_error", "out_of_memory"})
"""No other machine helps against it, where it is certain."""
_ONLY_GPU: frozenset[Step] = frozenset({"reset_gpu", "reboot"})
MACHINE_STEPS: frozenset[Step] = frozenset({"reset_gpu", "reboot", "replace_node"})
"""What is done to a machine, by its provider."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    committed: int
    """Steps that the run had committed at the last try."""
    tries: int
    """In a row, with no step committed in between."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What was tried against which fault, by its fingerprint."""

    entries: Mapping[str, _Entry]

    def tries(self, fingerprint: str, committed: int) -> int:
        """How often this fault was met with so many steps committed."""
        entry = self.entries.get(fingerprint)
        return entry.tries if entry is not None and entry.committed == committed else 0

    def with_try(self, fingerprint: str, committed: int) -> Ledger:
        """The ledger with one more."""
        entry = _Entry(committed=committed, tries=self.tries(fingerprint, committed) + 1)
        return replace(self, entries={**self.entries, fingerprint: entry})


EMPTY = Ledger(entries={})


def decide_step(verdict: Verdict, ledger: Ledger, committed: int) -> Step | None:
    """What to do about a verdict; None: nothing yet, it is too weak.

    Args:
        verdict: what is wrong.
        ledger: what was tried before.
        committed: steps that the run has committed.
    """
    if verdict.confidence == "weak":
        return None
    rungs = _rungs(verdict)
    return rungs[min(ledger.tries(verdict.fingerprint, committed), len(rungs) - 1)]


def _rungs(verdict: Verdict) -> list[Step]:
    """What can help against it, from the least."""
    first = _FIRST.get(verdict.cause, _FIRST["crash"])
    if verdict.cause in _ONLY_CODE and verdict.confidence == "certain":
        return [first, "stop"]
    begin = max(STEPS.index(first), STEPS.index(verdict.remedy or first))
    rungs = [step for step in STEPS[begin:] if _can_help(step, verdict)]
    return rungs or ["new_process"]


def _can_help(step: Step, verdict: Verdict) -> bool:
    if step in MACHINE_STEPS and not verdict.nodes:
        return False
    if step == "stop":
        return verdict.cause != "slow"
    return verdict.cause == "gpu_error" or step not in _ONLY_GPU
