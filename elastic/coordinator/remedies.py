"""Acts on verdicts: the rung of the ladder that is due is taken, or told.

    workers were lost ── after SETTLE_S, when instruments have looked ─┐
    a machine shows something else than before ── after GATHER_S ──────┴─► verdicts
    weak ──► nothing, unless a reading shows it again within minutes (`health/recurrence.py`)
    "tell" ──────────────────────────────────────────────────────────────► told
    retry, new process ── recovery has done so; who still lives is let go ► taken
    other seat ── someone idle on another machine? theirs is shunned ─────► taken | held_back
    reset GPU, reboot, replace node ── `replacements.py`, with its breaker ► taken
    stop ─────────────────────────────────────────────────────────────────► the run ends

`health/diagnosis.py` and `health/ladder.py` decide. What was taken is in the ledger, what was told
or held back is not: only a rung that was tried shows that it does not help. Whoever is let go
leaves at a step's boundary as one that is drained, so the run keeps `min_replicas` and repeats
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import product
from math import inf

from elastic.coordinator.aside import Aside
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.replacements import Replacements
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.failure import INCIDENT_S
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import PREEMPTION, SLOW, Cause
from elastic.reporting.verdicts import BEFORE_S, EventFacts
from health.diagnosis import Facts, diagnose
from health.ladder import EMPTY, MACHINE_STEPS, decide_step
from health.recurrence import AGAIN_S, Recurrence
from health.verdict import Confidence, Step, Verdict

SETTLE_S = INCIDENT_S
"""After the first loss of an incident: by then its other losses are known, and every instrument has
been looked at twice."""

GATHER_S = 1.0
"""After a machine has told. Where many tell together, as of a switch, all are judged once."""

_AGAINST: Mapping[Confidence, float] = {"certain": 1.0, "likely": 0.6}
"""What a verdict counts against its machines (`health/suspects.py`). Both make them suspect, for a
day and for six hours."""


_Key = tuple[str, tuple[str, ...]]
"""Of a verdict that stands: its fingerprint, and its machines, or else its workers."""


class Remedies:
    """Follows the run's events. All methods are immediate.

    Args:
        membership: knows how far the run is, and who is idle.
        dispatcher: ends the run.
        workers: leave their places.
        records: tell what happens, and take what became of it.
        replacements: mend machines.
        aside: where all this is done.
    """

    def __init__(
        self,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        records: RunLog,
        replacements: Replacements,
        aside: Aside,
    ) -> None:
        self._membership, self._dispatcher, self._workers = membership, dispatcher, workers
        self._records, self._replacements, self._aside = records, replacements, aside
        self._facts, self._ledger, self._recurrence = EventFacts(), EMPTY, Recurrence()
        self._lost: list[events.WorkerLost] = []
        """Of the incident that is looked at soon."""
        self._lost_at = 0
        """Steps that the run had committed when it began."""
        self._standing: dict[_Key, bool] = {}
        """Verdicts that stand without a loss, or did and whose signs still do -> whether they were
        strong enough to be met."""
        self._gathering = False
        records.followers.append(self.hear)

    def replay(self, happened: Iterable[events.Event]) -> None:
        """Takes up the ledger, what was met, and who is where, from the events of this start of the
        run. What was lost just before the coordinator was is not judged again."""
        met = set[_Key]()
        for event in happened:
            self._facts.take(event)
            if isinstance(event, events.VerdictReached):
                met.add((event.fingerprint, tuple(event.nodes or event.workers)))
                if event.tried:
                    self._ledger = self._ledger.with_try(event.fingerprint, event.committed)
        self._standing = dict.fromkeys(self._still_told(met), True)

    def hear(self, event: events.Event) -> None:
        """Something was written down."""
        self._facts.take(event)
        if isinstance(event, events.WorkerLost):
            if not self._lost:
                self._lost_at = self._membership.progress.recorded
                self._aside.spawn(self._judge_losses())
            self._lost.append(event)
        elif isinstance(event, events.SignsChanged) and not self._gathering:
            self._gathering = True
            self._aside.spawn(self._judge_signs())

    # -- from facts to verdicts --------------------------------------------------------------------

    async def _judge_losses(self) -> None:
        if not await self._aside.goes_on_for(SETTLE_S):
            return
        lost, self._lost = self._lost, []
        now, begin = time.time(), lost[0].time - BEFORE_S
        workers = [event.worker for event in lost]
        facts = self._facts.between(begin, inf, workers)  # all since: the clock may be set back
        # What machines show without a loss is met when they tell: it has not come again.
        signs = [sign for sign in facts.signs if sign.source != "loss"]
        stands = self._standing_verdicts(replace(facts, signs=signs))
        self._facts.forget_before(min(begin, now - AGAIN_S))
        stops = any(event.slot is not None for event in lost)  # a lost spare stops nobody
        found = [
            verdict
            for verdict in diagnose(facts)
            if verdict.cause != PREEMPTION  # that was announced
            and (not {*workers}.isdisjoint(verdict.workers) or _is_more(verdict, stands))
        ]
        await self._meet_all(found, facts, self._lost_at, counts=stops)

    async def _judge_signs(self) -> None:
        goes_on = await self._aside.goes_on_for(GATHER_S)
        self._gathering = False
        if not goes_on:
            return
        facts, now, before = self._facts.standing(), time.time(), self._standing
        begin = self._lost[0].time - BEFORE_S if self._lost else now
        self._facts.forget_before(min(begin, now - AGAIN_S))
        verdicts = self._standing_verdicts(facts)
        # One that was too weak may have become stronger since.
        new = [
            k
            for k, v in verdicts.items()
            if k not in before or (v.confidence != "weak" and not before[k])
        ]
        weighed = {k: self._recurrence.weigh(verdicts[k], facts.signs, now) for k in sorted(new)}
        self._standing = {k: before[k] for k in self._still_told(before)} | {
            k: before.get(k, False) or weighed.get(k, v).confidence != "weak"
            for k, v in verdicts.items()
        }
        await self._meet_all(list(weighed.values()), facts, self._membership.progress.recorded)

    def _still_told(self, keys: Iterable[_Key]) -> list[_Key]:
        """Those of `keys` whose machines have told of their signs last. A reading that stands on is
        no second one, though its machine had no worker for a while, or most showed it, too."""
        told = self._facts.told()
        return [
            (fingerprint, machines)
            for fingerprint, machines in keys
            if told.issuperset(product(fingerprint.split(":")[1:], machines))
        ]

    @staticmethod
    def _standing_verdicts(facts: Facts) -> dict[_Key, Verdict]:
        return {
            _key_of(v): v
            for v in diagnose(facts)
            if v.cause != SLOW  # costs time only: whoever measures it comes to `meet`
        }

    # -- from verdicts to remedies -----------------------------------------------------------------

    async def meet(self, verdict: Verdict) -> None:
        """A verdict that another part of the coordinator has come to, such as that a worker is
        slow: it takes the same way."""
        committed = self._membership.progress.recorded
        await self._meet_all([verdict], self._facts.standing(), committed)

    async def _meet_all(
        self, verdicts: Sequence[Verdict], facts: Facts, committed: int, *, counts: bool = True
    ) -> None:
        """Those of one look, with so many steps committed: the same fault of several machines is
        one try. What happens on machines that are being mended, or were, has been met."""
        due = [(verdict, decide_step(verdict, self._ledger, committed)) for verdict in verdicts]
        tried = set[str]()
        for verdict, step in due:
            machines = _machines(verdict, facts)
            attended = bool(machines) and all(map(self._replacements.attends_to, machines))
            if step is None or attended:
                continue
            is_try = counts and verdict.fingerprint not in tried
            if await self._meet(verdict, step, facts, committed, is_try) and is_try:
                tried.add(verdict.fingerprint)
                self._ledger = self._ledger.with_try(verdict.fingerprint, committed)

    async def _meet(
        self, verdict: Verdict, step: Step, facts: Facts, committed: int, is_try: bool
    ) -> bool:
        """Takes a step, or tells. Returns whether it was taken."""
        held = self._no_seats(verdict, facts) if step == "other_seat" else None
        if held is not None and verdict.nodes:
            step, held = "replace_node", None  # the machine that comes has the seats
        if step in MACHINE_STEPS:
            held = self._replacements.why_not(verdict.nodes)
        outcome: events.RemedyOutcome = "taken" if held is None else "held_back"
        if not self._replacements.acts:
            outcome, held = "told", 'health.replace_nodes = "tell"'
        tried = is_try and outcome == "taken"
        self._note(verdict, step, outcome, held or "", committed, tried=tried)
        if step in MACHINE_STEPS:
            self._mend(verdict, step)  # which tells, too
        elif outcome == "taken":
            await self._take(step, verdict, facts)
        return outcome == "taken"

    def _note(
        self,
        verdict: Verdict,
        step: Step,
        outcome: events.RemedyOutcome,
        detail: str,
        committed: int,
        *,
        tried: bool,
    ) -> None:
        self._records.note(
            events.VerdictReached(
                time=time.time(),
                cause=verdict.cause,
                workers=list(verdict.workers),
                nodes=list(verdict.nodes),
                evidence=list(verdict.evidence),
                confidence=verdict.confidence,
                fingerprint=verdict.fingerprint,
                committed=committed,
                step=step,
                outcome=outcome,
                detail=detail,
                tried=tried,
            )
        )

    async def _take(self, step: Step, verdict: Verdict, facts: Facts) -> None:
        why = _why(verdict)
        if step == "stop":
            await self._dispatcher.stop(
                f"{why}: it came back after all that could be tried, with no step in between. "
                f"the run's report.txt has the evidence; "
                f'health.replace_nodes = "tell" leaves the end to the budgets of HealthConfig',
                Cause(verdict.cause),
            )
            return
        if step == "other_seat":
            self._workers.shun(_machines(verdict, facts))
        if step != "retry":
            await self._workers.drain(self._living(verdict, facts), why, None, None)

    def _no_seats(self, verdict: Verdict, facts: Facts) -> str | None:
        """Why those at fault cannot get other seats; None where they can. Where they have been
        lost, others have theirs already, or nobody had."""
        living, config = self._living(verdict, facts), self._membership.config
        missing = max(0, config.max_replicas - self._membership.places.whole)
        return decide_seats(
            wanted=len(living) if living else missing * config.workers_per_replica,
            idle=self._idle_nodes(),
            left=_machines(verdict, facts) | self._workers.shunned_nodes,
        )

    def _mend(self, verdict: Verdict, step: Step) -> None:
        detail = verdict.evidence[0] if verdict.evidence else ""
        for node in verdict.nodes:
            weight = _AGAINST[verdict.confidence]
            self._replacements.mend(node, verdict.cause, detail, weight, step)

    def _living(self, verdict: Verdict, facts: Facts) -> list[str]:
        """Workers at fault that have not been lost; of a machine, all there."""
        at_fault = verdict.workers or [w for w, n in facts.nodes.items() if n in verdict.nodes]
        return [worker for worker in at_fault if worker in self._workers.started]

    def _idle_nodes(self) -> list[str]:
        """Of each idle worker its node."""
        started, places = self._workers.started, self._membership.places
        return [started[w].node for w in places.idle - places.retired if w in started]


def _key_of(verdict: Verdict) -> _Key:
    return verdict.fingerprint, verdict.nodes or verdict.workers


def _is_more(verdict: Verdict, stands: Mapping[_Key, Verdict]) -> bool:
    """Whether losses add to what stands without them, as where machines whose workers were lost
    name the same peer."""
    same = stands.get(_key_of(verdict))
    return same is None or same.confidence != verdict.confidence


def _machines(verdict: Verdict, facts: Facts) -> set[str]:
    """Those that a verdict is about, at fault or not."""
    return {facts.nodes[w] for w in verdict.workers if w in facts.nodes} | set(verdict.nodes)


def _why(verdict: Verdict) -> str:
    return ": ".join((verdict.cause, *verdict.evidence[:1]))


def decide_seats(*, wanted: int, idle: Iterable[str], left: Set[str]) -> str | None:
    """Why workers cannot get other seats, with the numbers; None where they can.

    Args:
        wanted: workers that leave theirs.
        idle: the node of each worker that waits for a place.
        left: nodes that get no place for this.
    """
    free = sum(node not in left for node in idle)
    if free >= wanted:
        return None
    return (
        f"{wanted} workers need another seat, and {free} wait on other machines: set "
        f"scaling.spares, or add machines"
    )
