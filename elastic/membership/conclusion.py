"""How a regroup ends: where everybody goes on, and what each worker is told. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic.membership.decisions import Outcome
from elastic.protocol.messages import Build, Order, Report, Run
from elastic.protocol.roster import Replica, Roster
from trainer.replication.step_commit import Commit


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What becomes of the interrupted step."""

    step: int
    """Where everybody goes on."""
    commit: Commit | None
    """Commit of step - 1."""
    outcome: Outcome
    """In a word."""


def find_states(reports: Iterable[Report], *, since: int) -> Iterator[tuple[int, list[Report]]]:
    """The states that somebody is at, the furthest first: each as its step and those who hold it.

    A state is a step S and the generation that committed S - 1, 0 where it was restored: another
    attempt at a step may have other bits. Who is at S - 1, and in that step in that generation,
    holds the state as well, for it has the whole gradient.

    Args:
        reports: of the workers that count.
        since: generation in which the run went back last; what is older is void.
    """
    at: dict[tuple[int, int], list[Report]] = defaultdict(list)
    in_step: dict[tuple[int, int], list[Report]] = defaultdict(list)
    for report in reports:
        if report.step is not None and report.generation >= since:
            at[report.step, 0 if report.last is None else report.last.generation].append(report)
            if report.in_step:
                in_step[report.step + 1, report.generation].append(report)
    for state in sorted(at, reverse=True):
        yield state[0], [*at[state], *in_step[state]]


def find_staying(
    reports: Iterable[Report], able: Sequence[Replica], *, since: int, recorded: int
) -> tuple[list[Replica], list[Report]]:
    """Which replicas go on with what they hold: those who wholly hold the furthest state that one
    of them does, and all who hold it.

    Args:
        reports: of all workers that are here.
        able: replicas that may go on.
        since: see `find_states`.
        recorded: steps that are in the records, at most one more than the living have done. A state
            further back is of a replica that had left, and those who went on are lost.
    """
    for step, holders in find_states(reports, since=since):
        if step + 1 < recorded:
            break
        names = {report.identity.worker for report in holders}
        staying = [replica for replica in able if names.issuperset(replica.workers)]
        if staying:
            return staying, holders
    return [], []


def decide_step(reports: Sequence[Report], *, stored: int, first: bool) -> Resolution:
    """Where everybody goes on.

    A step that one of the living saw committed is applied by all: whoever passed the commit knows
    that every worker holds the complete gradient (docs/architecture.md, "A step and its commit").

    Args:
        reports: of the workers with state, if a whole replica has it.
        stored: step of the newest checkpoint or snapshot, 0 without one.
        first: whether no roster stood before.
    """
    if not reports:
        return Resolution(step=stored, commit=None, outcome="start" if first else "restore")
    steps = [report.step or 0 for report in reports]
    step = max(steps)
    furthest = reports[steps.index(step)]
    outcome: Outcome = "boundary"
    if min(steps) < step:
        outcome = "finish_step"
    elif any(report.in_step for report in reports):
        outcome = "repeat"
    return Resolution(step=step, commit=furthest.last, outcome=outcome)


def plan_parts(
    order: Order,
    roster: Roster,
    settled: Callable[[str], int],
    builds: Mapping[str, Build],
) -> dict[str, Run]:
    """What each worker of `roster` is told.

    Args:
        order: what all are told.
        roster: it.
        settled: gives the signals that a worker's answer settles.
        builds: what followers are to build beside the steps.
    """
    parts = {
        worker: order.part(
            replica=replica.index,
            rank=rank,
            position=position,
            formed=replica.formed,
            serial=settled(worker),
        )
        for position, replica in enumerate(roster.replicas)
        for rank, worker in enumerate(replica.workers)
    }
    for rank in range(len(order.followers)):
        followers = enumerate(roster.followers_of(rank), start=len(roster.replicas))
        for position, (remnant, worker) in followers:
            parts[worker] = order.part(
                replica=remnant.index,
                rank=rank,
                position=position,
                formed=remnant.formed,
                serial=settled(worker),
                build=builds.get(worker),
            )
    return parts
