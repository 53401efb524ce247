"""From a run's events and steps to its incidents: what was lost, and what each loss cost.

Pure. An incident is everything from the first `WorkerLost` to the `RegroupDone` that ends it;
workers lost on the way belong to it. A lost spare is an incident of its own, without a regroup,
unless its node takes slots down as well.

Time is measured where a healthy replica feels it: in the gaps between committed steps. The median
gap is the step time; what a gap takes beyond it is a stall. A `RunStarted` splits the run: the time
between a stop and the next start is in no gap.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from elastic.events import (
    Event,
    FaultFired,
    RegroupCalled,
    RegroupDone,
    ReplicaHealed,
    RunEnded,
    RunStarted,
    StepRecord,
    WorkerLost,
)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The time between two committed steps that follow each other in one start of the run."""

    begin: float
    """When the earlier step was committed, in seconds since the epoch."""
    end: float
    """When the later step was committed, in seconds since the epoch."""
    lost_steps: int
    """Steps that were committed in the gap and then lost; they were done again later."""
    tokens: int
    """Tokens of the later step."""

    @property
    def seconds(self) -> float:
        """Length of the gap, the later step's own time included."""
        return self.end - self.begin

    def stall_s(self, step_s: float) -> float:
        """Seconds in which nothing was computed that counts now or counted then; at least 0.

        Lost steps are taken at `step_s` each, as their own records are gone.
        """
        return max(0.0, self.seconds - (1 + self.lost_steps) * step_s)

    def excess_s(self, step_s: float) -> float:
        """Seconds beyond one step: the stall and the time of the lost steps together."""
        return max(0.0, self.seconds - step_s)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One loss of workers and what followed. Times are in seconds; None: not known, or never."""

    time: float
    """When the first worker was declared lost, in seconds since the epoch."""
    cause: str
    """Causes in order of appearance, joined by ", "."""
    workers: tuple[str, ...]
    """Workers lost."""
    slots: tuple[str, ...]
    """Slots they held; empty when only spares were lost."""
    step: int
    """Step at which training went on; without a regroup, the step in progress at the loss."""
    outcome: str
    """Outcome of the regroup; "no_regroup" for spares, "unrecovered" when none came."""
    detect_s: float | None
    """From the injected fault to the loss of the worker it hit; None for faults of nature."""
    decide_s: float | None
    """From the loss to the call for a regroup."""
    regroup_s: float | None
    """From the call to the new roster."""
    first_step_s: float | None
    """From the new roster to the next committed step."""
    stall_s: float | None
    """Longest gap between committed steps around the incident, less the median step time and the
    time of lost steps."""
    rejoin_s: float | None
    """From the loss until the lost replicas had healed, or, where nothing healed, until as many
    replicas as before were alive."""
    lost_steps: int
    """Committed steps that had to be done again."""
    repeated_steps: int
    """Steps that were begun, not committed, and done again."""

    @property
    def regrouped(self) -> bool:
        """Whether training had to stop for it."""
        return bool(self.slots)

    @property
    def span(self) -> tuple[float, float]:
        """From the fault, or else the loss, to the new roster, in seconds since the epoch."""
        end = self.time + (self.decide_s or 0.0) + (self.regroup_s or 0.0)
        return self.time - (self.detect_s or 0.0), end


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """The events of one incident."""

    lost: tuple[WorkerLost, ...]
    called: RegroupCalled | None = None
    done: RegroupDone | None = None

    @property
    def slotted(self) -> bool:
        return any(e.slot is not None for e in self.lost)


@dataclass(frozen=True, kw_only=True)
class _Pace:
    """How training went on in time."""

    steps: Sequence[StepRecord]
    gaps: Sequence[Gap]
    step_s: float


def find_gaps(events: Sequence[Event], steps: Sequence[StepRecord]) -> list[Gap]:
    """The gaps between consecutive committed steps, none across a start of the run."""
    starts = [e.time for e in events if isinstance(e, RunStarted)]
    losses = [(e.time, e.lost_steps) for e in events if isinstance(e, RegroupDone) and e.lost_steps]
    return [
        Gap(
            begin=a.time,
            end=b.time,
            lost_steps=sum(n for t, n in losses if a.time < t <= b.time),
            tokens=b.tokens,
        )
        for a, b in pairwise(steps)
        if not any(a.time < t <= b.time for t in starts)
    ]


def median_step_s(gaps: Sequence[Gap]) -> float | None:
    """The step time of an undisturbed step: the median over all gaps; None without gaps."""
    return median(g.seconds for g in gaps) if gaps else None


def find_incidents(events: Sequence[Event], steps: Sequence[StepRecord]) -> list[Incident]:
    """All incidents of a run in the order of their first loss.

    Args:
        events: as `read_events` gives them.
        steps: as `read_steps` gives them: each step once, in order.
    """
    gaps = find_gaps(events, steps)
    pace = _Pace(steps=steps, gaps=gaps, step_s=median_step_s(gaps) or 0.0)
    used: set[FaultFired] = set()
    found = [
        _incident(loss, session, pace, used)
        for session in split_at_starts(events)
        for loss in _losses(session)
    ]
    return sorted(found, key=lambda i: i.time)


def split_at_starts(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each start of the run; what stands before the first start goes with it."""
    sessions: list[list[Event]] = [[]]
    started = False
    for event in events:
        if isinstance(event, RunStarted):
            if started:
                sessions.append([])
            started = True
        sessions[-1].append(event)
    return sessions


def _losses(events: Sequence[Event]) -> list[_Loss]:
    """Group the losses of one start of the run into incidents."""
    found: list[_Loss] = []
    pending: _Loss | None = None
    under_way: RegroupCalled | None = None  # survivors can notice a loss before the node agent does
    for event in events:
        if isinstance(event, RunEnded):
            break  # workers that leave after the end are no incident
        if isinstance(event, WorkerLost):
            if pending and not _belongs(event, pending):
                found.append(pending)
                pending = None
            pending = _Loss(
                lost=(*(pending.lost if pending else ()), event),
                called=pending.called if pending else under_way,
            )
        elif isinstance(event, RegroupCalled):
            under_way = event if event.reason == "fault" else None
            if pending and pending.slotted:
                pending = _Loss(lost=pending.lost, called=pending.called or event)
        elif isinstance(event, RegroupDone):
            under_way = None
            if pending and _ends(event, pending):
                found.append(_Loss(lost=pending.lost, called=pending.called, done=event))
                pending = None
    return [*found, pending] if pending else found


def _ends(event: RegroupDone, pending: _Loss) -> bool:
    """Whether a regroup ends the incident; an older one, overtaken by the loss, does not."""
    called = pending.called
    return pending.slotted and (called is None or event.generation >= called.generation)


def _belongs(event: WorkerLost, pending: _Loss) -> bool:
    """Whether a further loss is part of the pending one; spares alone share only their node."""
    return pending.slotted or pending.lost[-1].node == event.node


def _incident(
    loss: _Loss,
    session: Sequence[Event],
    pace: _Pace,
    used: set[FaultFired],
) -> Incident:
    first, called, done = loss.lost[0], loss.called, loss.done
    fault, detect_s = _detection(loss.lost, session, used)
    begin = min(first.time, fault.time) if fault else first.time
    end = done.time if done else loss.lost[-1].time
    after = _first_step_after(done.time, pace.steps) if done else None
    return Incident(
        time=first.time,
        cause=", ".join(dict.fromkeys(e.cause for e in loss.lost)),
        workers=tuple(e.worker for e in loss.lost),
        slots=tuple(e.slot for e in loss.lost if e.slot is not None),
        step=done.step if done else _step_in_progress(first.time, pace.steps),
        outcome=done.outcome if done else "unrecovered" if loss.slotted else "no_regroup",
        detect_s=detect_s,
        decide_s=max(0.0, called.time - first.time) if called else None,
        regroup_s=done.time - called.time if called and done else None,
        first_step_s=after.time - done.time if after and done else None,
        stall_s=_stall_s(pace, begin, end),
        rejoin_s=_rejoin_s(loss, session),
        lost_steps=done.lost_steps if done else 0,
        repeated_steps=done.repeated_steps if done else 0,
    )


def _detection(
    lost: Sequence[WorkerLost], session: Sequence[Event], used: set[FaultFired]
) -> tuple[FaultFired | None, float | None]:
    """The injected fault behind a loss and the time to its detection; a fault is used once."""
    for event in lost:
        faults = [
            f
            for f in session
            if isinstance(f, FaultFired)
            and f.worker == event.worker
            and f.time <= event.time
            and f not in used
        ]
        if faults:
            used.add(faults[-1])
            return faults[-1], event.time - faults[-1].time
    return None, None


def _first_step_after(time: float, steps: Sequence[StepRecord]) -> StepRecord | None:
    index = bisect_right(steps, time, key=lambda s: s.time)
    return steps[index] if index < len(steps) else None


def _step_in_progress(time: float, steps: Sequence[StepRecord]) -> int:
    """The step after the last one committed by `time`."""
    done = bisect_right(steps, time, key=lambda s: s.time)
    return steps[done - 1].step + 1 if done else 0


def touching(gaps: Sequence[Gap], begin: float, end: float) -> list[Gap]:
    """The gaps that begin..end (seconds since the epoch) runs through."""
    first = bisect_right(gaps, begin, key=lambda g: g.end)
    return list(gaps[first : bisect_right(gaps, end, key=lambda g: g.begin)])


def _stall_s(pace: _Pace, begin: float, end: float) -> float | None:
    stalls = [g.stall_s(pace.step_s) for g in touching(pace.gaps, begin, end)]
    return max(stalls, default=None)


def _rejoin_s(loss: _Loss, session: Sequence[Event]) -> float | None:
    """Seconds from the first loss until the lost replicas are back, see `Incident.rejoin_s`."""
    if not loss.slotted or loss.done is None:
        return None
    since = loss.lost[0].time
    later = session[session.index(loss.lost[0]) :]
    healed = [_healed_at(r, later, loss.done) for r in sorted(_replicas(loss.lost))]
    if healed and all(t is not None for t in healed):
        return max(t for t in healed if t is not None) - since
    full = _alive_before(loss.lost[0], session)
    rosters = [e for e in later if isinstance(e, RegroupDone)]
    return next((e.time - since for e in rosters if full and e.replicas >= full), None)


def _replicas(events: Sequence[Event]) -> set[int]:
    """Numbers of the replicas in which the lost workers among `events` held slots."""
    lost = (e for e in events if isinstance(e, WorkerLost))
    found = (re.match(r"replica (\d+)", e.slot or "") for e in lost)
    return {int(m[1]) for m in found if m}


def _healed_at(replica: int, later: Sequence[Event], done: RegroupDone) -> float | None:
    """When a replica healed, unless it was lost again before that."""
    for event in later:
        if isinstance(event, ReplicaHealed) and event.replica == replica:
            return event.time
        lost_again = isinstance(event, WorkerLost) and event.time > done.time
        if lost_again and replica in _replicas([event]):
            return None
    return None


def _alive_before(lost: WorkerLost, session: Sequence[Event]) -> int | None:
    """Replicas alive in the last roster before a loss; None before the first roster."""
    before = session[: session.index(lost)]
    return next((e.replicas for e in reversed(before) if isinstance(e, RegroupDone)), None)
