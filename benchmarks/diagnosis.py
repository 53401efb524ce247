"""Whether verdicts are right: faults and lines of logs of which the truth is known, each brought to
its verdict by the code of the report.

    python -m benchmarks.diagnosis

Takes seconds. Three sets: twelve process-level faults in four phases at three places, of which the
evidence is made by the functions that decide in a run (`_diagnosis_faults.py`); lines and readings
of GPUs, EFA and the kernel; and lines that others have published, gathered after the rules were
made (both in `_diagnosis_recorded.py`). Of the first two a third, drawn by a hash of the names, is
held out: its mistakes are counted and not shown, so a change of a rule is not fitted to them. Who
wrote the rules has written these cases, too; the published ones have their figures apart.

precision        of the verdicts that something is done for, those with the right cause
recall           of the faults that need something done, those with such a verdict
worker_accuracy  of these, those that name just the workers and machines at fault
false_evictions  workers or machines that something is done to, and that were not at fault
kinds_of_faults  of the process-level cases, those that differ by more than names and numbers

This measures how well the rules fit what they were written for. What it leaves out: whether a run
gets this evidence at all and how soon (`benchmarks.detection` injects the faults for real), faults
that come together, and lines that no source here has.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._common import print_result, say
from benchmarks._diagnosis_faults import Case, fault_cases, kinds
from benchmarks._diagnosis_recorded import published_cases, recorded_cases
from elastic.reporting.incidents import find_incidents
from elastic.reporting.verdicts import Advice, find_verdicts


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case."""

    case: Case
    done: Sequence[Advice]
    """Verdicts that something is done for."""

    @property
    def right(self) -> list[Advice]:
        """Those with the right cause."""
        return [one for one in self.done if one.verdict.cause == self.case.expected.cause]

    @property
    def placed(self) -> bool:
        """One names just those at fault, and calls for what helps, where that is known."""
        expected = self.case.expected
        return any(
            frozenset(one.verdict.workers) == expected.workers
            and frozenset(one.verdict.nodes) == expected.nodes
            and expected.remedy in (None, one.remedy)
            for one in self.right
        )

    @property
    def harmed(self) -> int:
        """Workers and machines that something is done to, and that were not at fault."""
        expected = self.case.expected
        acting = [f.verdict for f in self.done if f.remedy != "retry"]
        workers = {worker for verdict in acting for worker in verdict.workers}
        nodes = {node for verdict in acting for node in verdict.nodes}
        return len(workers & expected.spared) + len(nodes - expected.nodes)


def run(case: Case) -> Outcome:
    """Brings a case to its verdicts."""
    found = find_verdicts(case.events, [], find_incidents(case.events, []))
    return Outcome(case=case, done=[one for one in found if one.remedy is not None])


def is_held_out(case: Case) -> bool:
    """Whether a case's mistakes are counted, and not shown."""
    return hashlib.sha256(case.name.encode()).digest()[0] % 3 == 0


def score(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of some cases."""
    done = sum(len(outcome.done) for outcome in outcomes)
    right = sum(len(outcome.right) for outcome in outcomes)
    due = [outcome for outcome in outcomes if outcome.case.expected.cause is not None]
    found = [outcome for outcome in due if outcome.right]
    return {
        "cases": len(outcomes),
        **Counter(outcome.case.origin for outcome in outcomes),
        "precision": _share(right, done),
        "recall": _share(len(found), len(due)),
        "worker_accuracy": _share(sum(outcome.placed for outcome in due), len(due)),
        "false_evictions": sum(outcome.harmed for outcome in outcomes),
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0


def describe(outcome: Outcome) -> str:
    """A mistake, in words."""
    expected = outcome.case.expected
    got = "; ".join(
        f"{f.verdict.cause} {[*f.verdict.workers, *f.verdict.nodes]} {f.remedy}"
        for f in outcome.done
    )
    due = f"{expected.cause} {sorted(expected.workers | expected.nodes)} {expected.remedy or ''}"
    return f"{outcome.case.name}: {got or 'nothing'}, and not {due}"


def is_mistake(outcome: Outcome) -> bool:
    """Whether anything about a case is wrong."""
    due = outcome.case.expected.cause is not None
    wrong = len(outcome.right) < len(outcome.done)
    return outcome.harmed > 0 or wrong or (due and not outcome.placed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Judges all cases and prints one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    outcomes = [run(case) for case in (*fault_cases(), *recorded_cases())]
    open_ones = [outcome for outcome in outcomes if not is_held_out(outcome.case)]
    published = [run(case) for case in published_cases()]
    for outcome in filter(is_mistake, (*open_ones, *published)):
        say(describe(outcome))
    held_out = [outcome for outcome in outcomes if is_held_out(outcome.case)]
    apart = {"held_out": score(held_out), "published": score(published)}
    print_result({**score(open_ones), "kinds_of_faults": kinds(fault_cases()), **apart})


if __name__ == "__main__":
    main()
