"""From a run's events and steps to its incidents: what was lost, and what each loss cost.

Pure. An incident is everything from the first `WorkerLost` to the `RegroupDone` that ends it;
workers lost on the way belong to it. A lost spare is an incident of its own, without a regroup,
unless its node takes slots down as well.

Time is measured where a healthy replica feels it: in the gaps between committed steps. The median
gap without a regroup is the step time; what a gap takes beyond it is a stall. A `RunStarted` splits
the run: the time between a stop and the next start is in no gap, and each start, which may have
another layout, has its own step time.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from statistics import median

from elastic.membership.failure import INCIDENT_S
from elastic.protocol.events import (
    Event,
    FaultFired,
    RegroupCalled,
    RegroupDone,
    RegroupGathered,
    ReplicaHealed,
    RunEnded,
    RunStarted,
    StepRecord,
    WorkerLost,
)

KINDS = (
    FaultFired,
    RegroupCalled,
    RegroupDone,
    RegroupGathered,
    ReplicaHealed,
    RunEnded,
    RunStarted,
    WorkerLost,
)
"""Of events, that are looked at here."""


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
    replicas: int
    """Replicas that did the later step."""
    roster: float | None
    """When the last roster within stood, in seconds since the epoch; None: there was no regroup."""
    step_s: float
    """Seconds of an undisturbed step of its start: the median over the gaps without a regroup;
    where there are none, over those of all starts; where there are none either, over the times
    from a roster of its start to the next step."""

    @property
    def seconds(self) -> float:
        """Length of the gap, the later step's own time included."""
        return self.end - self.begin

    @property
    def stall_s(self) -> float:
        """Seconds in which nothing was computed that counts now or counted then; at least 0.

        Lost steps are taken at `step_s` each, as their own records are gone.
        """
        return max(0.0, self.seconds - (1 + self.lost_steps) * self.step_s)

    @property
    def excess_s(self) -> float:
        """Seconds beyond one step: the stall and the time of the lost steps together."""
        return max(0.0, self.seconds - self.step_s)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What was recorded from one start of the run to the next one."""

    events: Sequence[Event]
    """Its events; of the first start also those before it."""
    steps: Sequence[StepRecord]
    """Steps that it committed and that count now."""
    gaps: Sequence[Gap]
    """Between these."""


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
    """From the injected fault to the loss of the worker it hit; None for faults of nature, of which
    nobody knows when they began."""
    decide_s: float | None
    """From the loss to the call for a regroup; 0 where survivors had noticed it before."""
    abort_s: float | None
    """From then until the last of the called had let go of its step, 0 where it had before; None in
    records of versions that did not note it."""
    roster_s: float | None
    """From then, or else from the call, to the new roster: the decision, and where it takes that,
    the wait for workers and the making of replicas."""
    first_step_s: float | None
    """From the new roster to the next committed step of the same start."""
    stall_s: float | None
    """Longest gap between committed steps around the incident, less the median step time of that
    start and the time of lost steps."""
    rejoin_s: float | None
    """From the loss until the lost replicas had healed, or, where nothing healed, until as many
    replicas as before were alive."""
    heal_s: float | None
    """Part of it: from the lost replica's place in the roster until it had the state and had caught
    up; of several the longest."""
    catch_up_steps: int | None
    """The most steps that it had to make up for."""
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
        stages = self.decide_s, self.abort_s, self.roster_s
        end = self.time + sum(s for s in stages if s is not None)
        return self.time - (self.detect_s or 0.0), end


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """The events of one incident."""

    lost: tuple[WorkerLost, ...]
    called: RegroupCalled | None = None
    gathered: RegroupGathered | None = None
    done: RegroupDone | None = None

    @property
    def slotted(self) -> bool:
        return any(e.slot is not None for e in self.lost)


class _Session:
    """The events of one start of the run, indexed: of ten thousand incidents none looks through all
    of them."""

    def __init__(self, start: Start) -> None:
        self.start, events = start, start.events
        self._places = {id(e): i for i, e in enumerate(events) if isinstance(e, WorkerLost)}
        self._rosters = [(i, e) for i, e in enumerate(events) if isinstance(e, RegroupDone)]
        self._faults: dict[str, list[FaultFired]] = defaultdict(list)
        self._fates: dict[int, list[tuple[int, WorkerLost | ReplicaHealed]]] = defaultdict(list)
        for index, event in enumerate(events):
            if isinstance(event, FaultFired):
                self._faults[event.worker].append(event)
            elif isinstance(event, WorkerLost):
                for replica in _replicas([event]):
                    self._fates[replica].append((index, event))
            elif isinstance(event, ReplicaHealed):
                self._fates[event.replica].append((index, event))

    def faults(self, worker: str) -> Sequence[FaultFired]:
        """Injected faults that hit a worker."""
        return self._faults.get(worker, ())

    def fate(self, replica: int, lost: WorkerLost) -> Iterator[WorkerLost | ReplicaHealed]:
        """Losses of a replica's workers, and its heals, from a loss on."""
        found = self._fates.get(replica, [])
        first = bisect_left(found, self._places[id(lost)], key=lambda entry: entry[0])
        return (found[i][1] for i in range(first, len(found)))

    def rosters_after(self, lost: WorkerLost) -> Iterator[RegroupDone]:
        """Rosters after a loss."""
        return (self._rosters[i][1] for i in range(self._before(lost), len(self._rosters)))

    def roster_before(self, lost: WorkerLost) -> RegroupDone | None:
        """The last roster before a loss."""
        index = self._before(lost)
        return self._rosters[index - 1][1] if index else None

    def _before(self, lost: WorkerLost) -> int:
        return bisect_left(self._rosters, self._places[id(lost)], key=lambda entry: entry[0])


def _find_gaps(events: Sequence[Event], steps: Sequence[StepRecord]) -> list[Gap]:
    """The gaps between consecutive committed steps of one start, `step_s` not yet known."""
    losses = sorted(
        (e.time, e.lost_steps) for e in events if isinstance(e, RegroupDone) and e.lost_steps
    )
    lost_by = [0, *accumulate(n for _, n in losses)]
    rosters = sorted(e.time for e in events if isinstance(e, RegroupDone))
    times = [time for time, _ in losses]
    return [
        Gap(
            begin=a.time,
            end=b.time,
            lost_steps=max(
                0, lost_by[bisect_right(times, b.time)] - lost_by[bisect_right(times, a.time)]
            ),
            tokens=b.tokens,
            replicas=b.replicas,
            roster=_last_within(rosters, a.time, b.time),
            step_s=0.0,
        )
        for a, b in pairwise(steps)
    ]


def _last_within(times: Sequence[float], begin: float, end: float) -> float | None:
    index = bisect_right(times, end)
    return times[index - 1] if index and times[index - 1] > begin else None


def _with_step_times(starts: Sequence[Sequence[Gap]]) -> Iterator[list[Gap]]:
    """The gaps of each start, with their `step_s`."""
    undisturbed = [[gap.seconds for gap in gaps if gap.roster is None] for gaps in starts]
    of_all = list(chain.from_iterable(undisturbed))
    for gaps, own in zip(starts, undisturbed, strict=True):
        times = own or of_all or [gap.end - gap.roster for gap in gaps if gap.roster is not None]
        step_s = median(times) if times else 0.0
        yield [replace(gap, step_s=step_s) for gap in gaps]


def find_incidents(events: Sequence[Event], steps: Sequence[StepRecord]) -> list[Incident]:
    """All incidents of a run in the order of their first loss.

    Args:
        events: as `read_events` gives them.
        steps: as `read_steps` gives them: each step once, in order.
    """
    return incidents_of(split_at_starts(events, steps), steps)


def incidents_of(starts: Sequence[Start], steps: Sequence[StepRecord]) -> list[Incident]:
    """As `find_incidents`, of a run that has been cut at its starts."""
    used: set[FaultFired] = set()
    found = [
        _incident(loss, session, steps, used)
        for session in map(_Session, starts)
        for loss in _losses(session.start.events)
    ]
    return sorted(found, key=lambda i: i.time)


def split_at_starts(events: Sequence[Event], steps: Sequence[StepRecord]) -> list[Start]:
    """The starts of the run, one at least; what stands before the first one goes with it, unless a
    roster is there: then it is of a start whose line is lost."""
    sessions: list[list[Event]] = [[]]
    begun = False
    for event in events:
        if isinstance(event, RunStarted) and begun:
            sessions.append([])
        begun = begun or isinstance(event, RunStarted | RegroupDone)
        sessions[-1].append(event)
    begins = sorted(session[0].time for session in sessions[1:])
    parts: list[list[StepRecord]] = [[] for _ in sessions]
    for step in steps:
        parts[bisect_right(begins, step.time)].append(step)
    gaps = _with_step_times([*map(_find_gaps, sessions, parts)])
    return [
        Start(events=session, steps=part, gaps=between)
        for session, part, between in zip(sessions, parts, gaps, strict=True)
    ]


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
            known = pending or _Loss(lost=(), called=under_way)
            pending = replace(known, lost=(*known.lost, event))
        elif isinstance(event, RegroupCalled):
            under_way = event if event.reason == "fault" else None
            if pending and pending.slotted:
                pending = replace(pending, called=pending.called or event)
        elif isinstance(event, RegroupGathered):
            if pending and _concerns(event, pending):
                pending = replace(pending, gathered=event)
        elif isinstance(event, RegroupDone):
            under_way = None
            if pending and _concerns(event, pending):
                found.append(replace(pending, done=event))
                pending = None
    return [*found, pending] if pending else found


def _concerns(event: RegroupGathered | RegroupDone, pending: _Loss) -> bool:
    """Whether a regroup is that of the incident; an older one, overtaken by the loss, is not."""
    called = pending.called
    return pending.slotted and (called is None or event.generation >= called.generation)


def _belongs(event: WorkerLost, pending: _Loss) -> bool:
    """Whether a further loss is part of the pending one. Of workers without a place, whose loss
    calls nobody to regroup, only those of one node at one time."""
    together = event.time - pending.lost[0].time <= INCIDENT_S
    return pending.slotted or (together and pending.lost[-1].node == event.node)


def _incident(
    loss: _Loss,
    session: _Session,
    steps: Sequence[StepRecord],
    used: set[FaultFired],
) -> Incident:
    first, done = loss.lost[0], loss.done
    fault, detect_s = _detection(loss.lost, session, used)
    begin = min(first.time, fault.time) if fault else first.time
    end = done.time if done else loss.lost[-1].time
    after = _first_step_after(done.time, session.start.steps) if done else None
    decide_s, abort_s, roster_s = _stages(loss)
    heals = _heals(loss, session)
    return Incident(
        time=first.time,
        cause=", ".join(dict.fromkeys(e.cause for e in loss.lost)),
        workers=tuple(e.worker for e in loss.lost),
        slots=tuple(e.slot for e in loss.lost if e.slot is not None),
        step=done.step if done else _step_in_progress(first.time, steps),
        outcome=done.outcome if done else "unrecovered" if loss.slotted else "no_regroup",
        detect_s=detect_s,
        decide_s=decide_s,
        abort_s=abort_s,
        roster_s=roster_s,
        first_step_s=after.time - done.time if after and done else None,
        stall_s=max((g.stall_s for g in touching(session.start.gaps, begin, end)), default=None),
        rejoin_s=_rejoin_s(loss, heals, session),
        heal_s=max((heal.seconds for heal in heals if heal), default=None),
        catch_up_steps=max((heal.catch_up_steps for heal in heals if heal), default=None),
        lost_steps=done.lost_steps if done else 0,
        repeated_steps=done.repeated_steps if done else 0,
    )


def _stages(loss: _Loss) -> tuple[float | None, float | None, float | None]:
    """The seconds of `Incident.decide_s`, `abort_s` and `roster_s`: each begins where the one
    before it ends."""
    if loss.called is None:
        return None, None, None
    lost = loss.lost[0].time
    called = max(lost, loss.called.time)
    gathered = max(called, loss.gathered.time) if loss.gathered else called
    return (
        called - lost,
        gathered - called if loss.gathered else None,
        loss.done.time - gathered if loss.done else None,
    )


def _detection(
    lost: Sequence[WorkerLost], session: _Session, used: set[FaultFired]
) -> tuple[FaultFired | None, float | None]:
    """The injected fault behind a loss and the time to its detection; a fault is used once."""
    for event in lost:
        faults = [f for f in session.faults(event.worker) if f.time <= event.time and f not in used]
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


def _rejoin_s(
    loss: _Loss, heals: Sequence[ReplicaHealed | None], session: _Session
) -> float | None:
    """Seconds from the first loss until the lost replicas are back, see `Incident.rejoin_s`."""
    if not loss.slotted or loss.done is None:
        return None
    since = loss.lost[0].time
    if heals and all(heals):
        return max(heal.time for heal in heals if heal) - since
    before = session.roster_before(loss.lost[0])
    if before is None:
        return None
    rosters = session.rosters_after(loss.lost[0])
    return next((e.time - since for e in rosters if e.replicas >= before.replicas), None)


def _heals(loss: _Loss, session: _Session) -> list[ReplicaHealed | None]:
    """How each of the lost replicas healed; None for one that did not."""
    done = loss.done
    if done is None:
        return []
    first = loss.lost[0]
    return [
        _heal_of(session.fate(replica, first), done) for replica in sorted(_replicas(loss.lost))
    ]


def _replicas(events: Sequence[Event]) -> set[int]:
    """Numbers of the replicas in which the lost workers among `events` held slots."""
    lost = (e for e in events if isinstance(e, WorkerLost))
    found = (re.match(r"replica (\d+)", e.slot or "") for e in lost)
    return {int(m[1]) for m in found if m}


def _heal_of(fate: Iterator[WorkerLost | ReplicaHealed], done: RegroupDone) -> ReplicaHealed | None:
    """How a replica healed, unless it was lost again before that."""
    for event in fate:
        if isinstance(event, ReplicaHealed):
            return event
        if event.time > done.time:
            return None
    return None
