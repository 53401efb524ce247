"""From a run's events to its verdicts: what was wrong at each incident, and what helps. Pure.

The facts of an incident are what the run lost in it, what those lines say that came with the
losses, and what the machines showed round that time. `health/diagnosis.py` decides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from elastic.protocol import causes
from elastic.protocol.events import (
    CrossGroupLost,
    Event,
    ReplicaForming,
    RunEnded,
    SignsChanged,
    StepRecord,
    StragglersFound,
    WorkerJoined,
    WorkerLost,
)
from elastic.reporting.incidents import Incident
from health.diagnosis import Facts, diagnose
from health.ladder import EMPTY, decide_step
from health.signatures import find_signs
from health.verdict import Sign, Step, Verdict, sign_from_json

KINDS = (
    CrossGroupLost,
    ReplicaForming,
    RunEnded,
    SignsChanged,
    StragglersFound,
    WorkerJoined,
    WorkerLost,
)
"""Of events, that are looked at here."""

BEFORE_S, AFTER_S = 60.0, 30.0
"""Signs that were seen so long before an incident's first loss, or after its last roster, belong to
it: the kernel is often the first to say something, instruments are looked at every few seconds."""

_CASCADES = frozenset({causes.COLLECTIVE})
"""Causes of losses that follow from something else, where there is anything else."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A verdict, and what it calls for."""

    time: float
    """Of the incident's first loss, or when a machine told last, in seconds since the epoch."""
    step: int
    """The step at which training went on."""
    verdict: Verdict
    """What was wrong."""
    remedy: Step | None
    """The step of the ladder that is due (`health/ladder.py`); None: nothing yet."""


def find_verdicts(
    events: Sequence[Event], steps: Sequence[StepRecord], incidents: Sequence[Incident]
) -> list[Advice]:
    """What was wrong at each incident and where stragglers were found, in order, and what machines
    show at the end.

    Args:
        events: all of the run.
        steps: its committed steps, in order.
        incidents: as `find_incidents` gives them.
    """
    facts, ledger = EventFacts(events), EMPTY
    found: list[Advice] = []

    def add(time: float, step: int, of: Facts, *, at_end: bool = False) -> None:
        nonlocal ledger
        committed = bisect_right(steps, time, key=lambda step: step.time)
        known = {(one.verdict.fingerprint, one.verdict.nodes) for one in found} if at_end else ()
        before, tried = ledger, set[str]()
        for verdict in diagnose(of):
            if (verdict.fingerprint, verdict.nodes) in known:
                continue  # it stands since an incident, and has not come again
            remedy = decide_step(verdict, before, committed)
            if verdict.fingerprint not in tried:  # as the coordinator counts (`Remedies`)
                tried.add(verdict.fingerprint)
                ledger = ledger.with_try(verdict.fingerprint, committed)
            found.append(Advice(time=time, step=step, verdict=verdict, remedy=remedy))

    found_at: list[Incident | StragglersFound] = [*incidents, *facts.stragglers]
    for one in sorted(found_at, key=lambda one: one.time):
        if isinstance(one, StragglersFound):
            add(one.time, one.step, facts.of_stragglers(one))
            continue
        begin, end = one.span
        add(one.time, one.step, facts.between(begin - BEFORE_S, end + AFTER_S, one.workers))
    if facts.shown_s is not None:
        add(facts.shown_s, steps[-1].step + 1 if steps else 0, facts.standing(), at_end=True)
    ends = [event for event in events if isinstance(event, RunEnded)]
    return [_with_end(one, ends) for one in found]


def _with_end(one: Advice, ends: Sequence[RunEnded]) -> Advice:
    """The advice as it was followed: the run stopped where the cause had come back. Of several
    workers that were lost for it at once none is the one that was too many."""
    end = next((end for end in ends if end.time >= one.time), None)
    if end is None or (end.cause, end.step) != (one.verdict.cause, one.step):
        return one
    return replace(one, remedy="stop")


class EventFacts:
    """What the events of a run say, indexed: of ten thousand incidents none looks through all of
    them, nor at machines that show nothing.

    Args:
        events: of the run, so far.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._nodes: dict[str, str] = {}
        self._workers: dict[str, set[str]] = defaultdict(set)
        """Node -> its workers that were not forgotten; of a node that had some."""
        self._replicas: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._lost: dict[str, WorkerLost] = {}
        self._back: set[str] = set()
        """Those of them that live after all: they had been written off by a coordinator that was
        cut off, and the one started anew has taken them back."""
        self._groups: list[CrossGroupLost] = []
        self.stragglers: list[StragglersFound] = []
        """That were found, in order of time."""
        self._shown: dict[str, SignsChanged] = {}
        """Node -> what it shows, in the order in which they told: clocks are set back; of those
        that show something."""
        self._told: list[SignsChanged] = []
        """In order of time."""
        self._passed = 0
        """Those of them that `_stood` has taken in."""
        self._stood: dict[str, SignsChanged] = {}
        """Node -> what it showed then; of those that showed something."""
        self._base: dict[str, SignsChanged] = {}
        """What they showed before the first of `_told`."""
        for event in events:
            self.take(event)

    @property
    def shown_s(self) -> float | None:
        """When a machine has told last what it shows; None: none did."""
        return self._told[-1].time if self._told else None

    def take(self, event: Event) -> None:
        """One more event."""
        if isinstance(event, (WorkerJoined, WorkerLost)):
            self._nodes[event.worker] = event.node
            self._workers[event.node].add(event.worker)
        if isinstance(event, ReplicaForming):
            self._replicas |= dict.fromkeys(event.workers, f"replica {event.replica}")
        elif isinstance(event, WorkerJoined) and event.worker in self._lost:
            self._back.add(event.worker)
        elif isinstance(event, WorkerLost):
            self._lost[event.worker] = event
            self._back.discard(event.worker)
        elif isinstance(event, SignsChanged):
            self._names |= dict.fromkeys((*event.names, event.node), event.node)
            _show(self._shown, event)
            at = bisect_right(self._told, event.time, key=_time)
            self._told.insert(at, event)
            if at < self._passed:  # the clock was set back
                self._passed, self._stood = 0, dict(self._base)
        elif isinstance(event, CrossGroupLost):
            insort(self._groups, event, key=_time)
        elif isinstance(event, StragglersFound):
            insort(self.stragglers, event, key=_time)

    def forget_before(self, time: float) -> None:
        """Drops what no incident after `time`, in seconds since the epoch, needs."""
        self._stand_at(time)
        del self._told[: self._passed], self._groups[: bisect_left(self._groups, time, key=_time)]
        del self.stragglers[: bisect_left(self.stragglers, time, key=_time)]
        self._passed, self._base = 0, dict(self._stood)
        for worker in [w for w, event in self._lost.items() if event.time < time]:
            del self._lost[worker]
            if worker not in self._back:
                self._workers[self._nodes.pop(worker)].discard(worker)
                self._replicas.pop(worker, None)
        self._back &= self._lost.keys()

    def between(self, begin: float, end: float, lost: Sequence[str]) -> Facts:
        """The facts of an incident. What a machine shows that had lost all its workers before says
        nothing of it.

        Args:
            begin: from when on signs count, in seconds since the epoch.
            end: and until when.
            lost: the workers that it took.
        """
        losses = [self._lost[worker] for worker in lost]
        failed = self._groups[
            bisect_left(self._groups, begin, key=_time) : bisect_right(self._groups, end, key=_time)
        ]
        self._stand_at(begin)
        told = self._told[self._passed : bisect_right(self._told, end, key=_time)]
        if end == inf:  # the clock may be set back: what seems told long after counts if it stands
            until = max((event.time for event in losses), default=begin) + AFTER_S
            told = [e for e in told if e.time <= until or self._shown.get(e.node) is e]
        first = min((event.time for event in losses), default=begin)
        shown = [e for e in (*self._stood.values(), *told) if not self._is_gone(e.node, first)]
        return Facts(
            signs=[
                *(sign for event in losses for sign in _signs_of_loss(event)),
                *(sign for event in failed for sign in _signs_of_group(event)),
                *_signs_of_nodes(shown),
            ],
            nodes=self._nodes,
            replicas={e.worker: e.slot.split(" shard")[0] for e in losses if e.slot},
            names=self._names,
        )

    def of_stragglers(self, event: StragglersFound) -> Facts:
        """What shows that workers are slow, and what their machines show that may be why."""
        nodes = {self._nodes[worker] for worker in event.workers if worker in self._nodes}
        self._stand_at(event.time - BEFORE_S)
        upto = bisect_right(self._told, event.time + AFTER_S, key=_time)
        told = [*self._stood.values(), *self._told[self._passed : upto]]
        shown = _signs_of_nodes(one for one in told if one.node in nodes)
        return Facts(
            signs=[
                *_signs_of_stragglers(event),
                *(sign for sign in shown if sign.role == "confirmation"),
            ],
            nodes=self._nodes,
            replicas=self._replicas,
            names=self._names,
        )

    def standing(self) -> Facts:
        """What the machines show at the end, of those who were not lost."""
        here = self._nodes.keys() - (self._lost.keys() - self._back)
        nodes = {worker: self._nodes[worker] for worker in here}
        live = {*nodes.values()}
        return Facts(
            signs=_signs_of_nodes(
                [self._shown[node] for node in sorted(self._shown.keys() & live)]
            ),
            nodes=nodes,
            replicas={w: replica for w, replica in self._replicas.items() if w in here},
            names=self._names,
        )

    def told(self) -> set[tuple[str, str | None]]:
        """Each sign that machines have told last, by its name, and the machine that it accuses;
        also of machines that have lost all their workers."""
        return {
            (sign.name, self._names.get(sign.peer) if sign.peer else sign.node)
            for sign in _signs_of_nodes(self._shown.values())
        }

    def _is_gone(self, node: str, time: float) -> bool:
        """Whether a node had workers, and has lost all of them before `time`."""
        return node in self._workers and all(
            worker in self._lost and worker not in self._back and self._lost[worker].time < time
            for worker in self._workers[node]
        )

    def _stand_at(self, time: float) -> None:
        """Brings `_stood` to just before `time`. Incidents come in order, nearly: to go back is to
        begin anew."""
        upto = bisect_left(self._told, time, key=_time)
        if upto < self._passed:
            self._passed, self._stood = 0, dict(self._base)
        for event in self._told[self._passed : upto]:
            _show(self._stood, event)
        self._passed = upto


def _time(event: Event) -> float:
    return event.time


def _show(shown: dict[str, SignsChanged], event: SignsChanged) -> None:
    if event.signs:
        shown[event.node] = event
    else:
        shown.pop(event.node, None)


def _signs_of_loss(event: WorkerLost) -> Iterator[Sign]:
    yield Sign(
        name=event.cause,
        source="loss",
        role="cascade" if event.cause in _CASCADES else "root",
        cause=event.cause,
        subject="worker",
        detail=event.detail,
        worker=event.worker,
        node=event.node,
        at_s=event.time,
        decisive=True,
    )
    yield from find_signs(event.detail.splitlines(), "worker", event.node, event.time)


def _signs_of_group(event: CrossGroupLost) -> Iterator[Sign]:
    """Of a group across replicas that has failed. Old records know who told by its slot alone."""
    where = event.node or event.slot or ""
    yield Sign(
        name="cross_group_lost",
        source="loss",
        role="cascade",
        cause=causes.COLLECTIVE,
        subject="link",
        detail=event.reason,
        node=where,
        at_s=event.time,
    )
    yield from find_signs(event.reason.splitlines(), "worker", where, event.time)


def _signs_of_stragglers(event: StragglersFound) -> Iterator[Sign]:
    for worker in event.workers:
        yield Sign(
            name="straggler",
            source="reading",
            role="root",
            cause=causes.SLOW,
            subject="worker",
            detail=event.detail,
            of=", ".join(event.workers),
            worker=worker,
            node=event.nodes[0] if event.nodes else None,
            at_s=event.time,
            decisive=True,
        )


def _signs_of_nodes(told: Iterable[SignsChanged]) -> list[Sign]:
    """What nodes have shown, each sign as it was last."""
    found: dict[tuple[object, ...], Sign] = {}
    for event in told:
        for sign in filter(None, map(sign_from_json, event.signs)):
            key = event.node, sign.name, sign.source, sign.of, sign.worker, sign.peer
            found[key] = sign
    return list(found.values())
