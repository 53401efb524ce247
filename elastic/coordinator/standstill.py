"""Watches that steps are committed, and finds out who keeps them where none is.

    no step for 0.6 of the bound ──► where is everybody? who is suspect? evidence is taken, and
                                     connections between the nodes of those who wait are tried
    no step for 0.8 of the bound ──► evidence is taken again
    no step for the bound ─────────► those who have not moved since are killed, or those on the node
                                     that no large message reaches; the rest is recovery
                                     where all wait for each other, they are called to regroup,
                                     and have twice as long from then on
    a step before anybody is accused ► what was found is kept, too, of the first few: who was slow

Nobody is asked anything while steps come. `health/progress.py` decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from elastic.coordinator.agents import NodeAgents
from elastic.coordinator.aside import Aside
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.evidence import LESSER_SHARE, keep_evidence
from elastic.coordinator.link_tests import LinkTests
from elastic.coordinator.workers import Workers
from elastic.membership.links import FailedLink
from elastic.membership.machine import Membership
from elastic.protocol.causes import HANG
from elastic.protocol.events import StepRecord
from elastic.protocol.messages import Evidence
from elastic.protocol.roster import Roster
from health.absence import Absence, find_absences
from health.progress import SOON, Place, Standstill, bound_s, find_standstill
from health.stack_groups import find_stack_groups

log = logging.getLogger(__name__)

_FEWEST_STEPS = 3
"""Durations of steps from which a bound follows."""
STEPS = 50
"""The latest ones count."""
_MOST_ASKED = 64
"""Workers of whom evidence is taken when some are first suspected; of more there is a sample."""
_WAITERS = 2
"""Of those who wait, that are asked again with the suspects. All that is found of them is kept."""
_HOME = "train_worker"
"""Function of `elastic/worker/entry.py` that the thread which trains is in."""
_CALM_S = 0.5
"""Between two looks at whether steps come."""
_AGAIN = 0.8
"""Share of the bound at which evidence is taken again: it takes up to a second."""
_LOOK_S = 0.2
"""Between two looks at where all are, while none comes."""
_MOST_SLOW = 10
"""Standstills without a verdict that are kept, of each start of the coordinator."""


_Places = Sequence[Mapping[str, Place | None]]
"""Where the roster's workers are, by replica."""


class _Stand(NamedTuple):
    """How far the run is. Where it goes back, there is another generation."""

    step: int
    """The latest in the records."""
    generation: int
    """Of the roster that is at work now."""


@dataclass
class _Found:
    """What looks at a standstill have found so far."""

    last: _Stand
    """Where the run stands still."""
    bound_s: float
    """For how long it may."""
    suspects: dict[str, str] = field(default_factory=dict)
    """Workers that were suspected, and what showed it last."""
    places: _Places = ()
    """Where all were when somebody was suspected last."""
    first: dict[str, Evidence] = field(default_factory=dict)
    """Of workers when they were suspected."""
    second: dict[str, Evidence] = field(default_factory=dict)
    """Of workers later."""
    waiting: Sequence[str] = ()
    """Workers between whose nodes connections were tried."""
    failed: Sequence[FailedLink] | None = None
    """Those that failed; None: they were not tried yet."""
    no_step_for_s: float = 0.0
    """Until one came, or somebody was accused."""

    def seen(self) -> dict[str, Evidence]:
        """By worker; both looks at those who were looked at twice."""
        both = {w: _twice(self.first.get(w), second) for w, second in self.second.items()}
        return {**self.first, **both}


class StandstillWatch:
    """One for the run; it runs on the coordinator's event loop.

    Args:
        least_s: `HealthConfig.progress_timeout_s`.
        shared_s: bound where most workers are in a phase that takes long.
        incidents: where evidence is kept.
        membership: knows the roster.
        dispatcher: runs it, and decides what follows.
        workers: ends those at fault.
        agents: know where workers are.
        link_tests: try connections, and take out whom failed ones have in common.
        aside: where evidence is written.
        cross_lost: called where all wait for each other, with generation and reason.
    """

    def __init__(
        self,
        least_s: float,
        shared_s: float,
        incidents: Path,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        agents: NodeAgents,
        link_tests: LinkTests,
        aside: Aside,
        cross_lost: Callable[[int, str], Coroutine[Any, Any, None]],
    ) -> None:
        self._least_s, self._shared_s, self._incidents = least_s, shared_s, incidents
        self._membership, self._dispatcher = membership, dispatcher
        self._workers, self._agents, self._cross_lost = workers, agents, cross_lost
        self._link_tests, self._aside = link_tests, aside
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self._last: StepRecord | None = None
        self._came_s = 0.0
        self._shared_until_s = -inf
        """Most replicas stood still then."""
        self._patience = 1.0
        """Doubled with each call where all waited for each other and no connection failed, until a
        step comes within the bound again: their collectives may be slow, and no call helps that."""
        self._watching = False
        self._good: _Stand | None = None
        """Where connections were tried and are good, or nobody can be taken out."""
        self._found: _Found | None = None
        """Of the latest standstill, until there is a verdict on it or a step comes."""
        self._slow: _Found | None = None
        """Of the first such step that is not kept yet."""
        self._slow_kept = 0
        """How many were."""
        self._keeping: asyncio.Future[None] | None = None
        """The latest of them: of a storage that hangs one thread is enough."""

    def replay(self, steps: Sequence[StepRecord]) -> None:
        """Steps were in the records when the coordinator was started anew."""
        for step in steps:
            before, self._last = self._last, step
            if before is not None and before.generation == step.generation:
                self._steps_s.append(max(0.0, step.time - before.time))

    def committed(self, steps: Sequence[StepRecord]) -> None:
        """Steps are in the records. A standstill that ended in a call has not passed: the losses
        that led to it tell of it."""
        found, self._found = self._found, None
        if found is not None and found.last.generation == self._membership.roster.generation:
            found.no_step_for_s = self._still_s
            self._slow = self._slow or found
        if self._patience > 1.0 and self._still_s <= self._bound_s:
            self._patience = 1.0
        self.replay(steps)
        self.begin()

    def begin(self) -> None:
        """A step is in the records; or a roster begins, whose first step may stand still, too."""
        self._came_s = self._agents.awake_s()
        if not self._watching and len(self._steps_s) >= _FEWEST_STEPS:
            self._watching = True
            self._dispatcher.spawn(self._watch())

    async def _watch(self) -> None:
        while self._membership.stopped is None:
            await asyncio.sleep(_CALM_S)
            self._keep_slow()
            stand = self._stand
            if stand is not None and self._still_s >= SOON * self._bound_s:
                await self._look(stand)

    @property
    def _stand(self) -> _Stand | None:
        """None before the first step."""
        if self._last is None:
            return None
        return _Stand(self._last.step, self._membership.roster.generation)

    async def _look(self, last: _Stand) -> None:
        """No step has come for long. Whoever is suspect is looked at again before it is accused."""
        marks: dict[str, int] = {}
        found = _Found(last, self._bound_s, failed=() if self._good == last else None)
        while not self._over(last):
            places = await self._places()
            if self._over(last):
                return  # a step came while agents were asked: that is no standstill
            soon, now = self._judge(places)
            may_fail = soon.standing and (found.failed is None or found.failed)
            if not (soon.suspects or soon.all_wait or may_fail):
                return
            found.places = places
            accused = {s.worker: s.evidence for s in now.suspects if marks.get(s.worker) == s.mark}
            if accused or now.all_wait or (now.standing and found.failed):
                await self._act(accused, found, all_wait=now.all_wait)
                return
            self._found = found
            found.suspects |= {suspect.worker: suspect.evidence for suspect in soon.suspects}
            suspects = [suspect.worker for suspect in soon.suspects]
            if found.failed is None:
                found.waiting = self._mates(soon.standing) or self._membership.roster.workers
                found.first, found.failed = await asyncio.gather(
                    self._evidence(suspects, _MOST_ASKED - len(suspects)),
                    self._link_tests.try_between(found.waiting),
                )
                self._good = None if found.failed else last
            elif _lacks(found.first, suspects):
                found.first |= await self._evidence(suspects)
            elif self._still_s >= _AGAIN * self._bound_s and _lacks(found.second, suspects):
                found.second |= await self._evidence(suspects)
            marks = {suspect.worker: suspect.mark for suspect in soon.suspects}
            await asyncio.sleep(_LOOK_S)

    def _judge(self, places: _Places) -> tuple[Standstill, Standstill]:
        """What suspects, and what accuses."""
        soon, now = (
            find_standstill(
                places,
                self._least_s,
                self._steps_s,
                share=share,
                shared_s=self._shared_s,
                single_s=self._agents.awake_s() - self._shared_until_s,
                patience=self._patience,
            )
            for share in (SOON, 1.0)
        )
        if soon.shared:
            self._shared_until_s = self._agents.awake_s()
        return soon, now

    async def _act(self, accused: Mapping[str, str], found: _Found, *, all_wait: bool) -> None:
        """Ends those at fault. What was found is kept meanwhile: a storage that takes its time must
        not hold up their peers."""
        last = found.last
        failed = await self._link_tests.try_again(found.failed or (), found.waiting)
        if not (accused or all_wait or failed):
            self._good = last
            return
        if _lacks(found.second, list(accused)):
            found.second |= await self._evidence(list(accused))
        absences = await asyncio.to_thread(
            _find_absences, found.seen(), self._membership.roster.met
        )
        if await self._some_moved(accused, found.places) or self._over(last):
            return  # in this order: a worker may be lost while agents are asked
        self._found = None
        found.no_step_for_s = self._still_s
        self._keep(found, accused, failed, absences)
        if accused:
            failed = [link for link in failed if not accused.keys().isdisjoint(link[:2])]
        removed: set[str] = set()
        if failed:
            removed = await self._link_tests.remove(failed, lost_anyway=accused)
        cut_off = {end for link in failed if removed & {*link[:2]} for end in link[:2]}
        for worker, evidence in accused.items():
            if worker not in cut_off:
                where = _where_absent(worker, absences)
                detail = f"it keeps the others: {evidence}{where} (health.progress_timeout_s)"
                await self._workers.kill(worker, HANG, detail)
        if not accused and not removed:
            self._good = last
            if all_wait:
                if not failed:
                    self._patience *= 2.0
                reason = f"no step for {self._still_s:.1f} s, and all wait for each other"
                await self._cross_lost(last.generation, reason)
        self._came_s = self._agents.awake_s()  # what follows has its own bounds

    def _keep_slow(self) -> None:
        """Keeps what was found of a slow step, if there is one. The look at it is over."""
        found = self._slow
        if found is None or (self._keeping is not None and not self._keeping.done()):
            return
        self._slow = None
        if not found.first or self._slow_kept == _MOST_SLOW:
            return
        self._slow_kept += 1
        self._keeping = self._keep(
            found,
            {},
            found.failed or (),
            resolved=True,
            suspects=found.suspects,
            share=LESSER_SHARE,
        )
        if self._slow_kept == _MOST_SLOW:
            log.warning(
                "step %d came after %.1f s, where %.1f s are long: of no further standstill that "
                "passes what was found is kept in %s, %d are enough (health.progress_timeout_s)",
                found.last.step + 1,
                found.no_step_for_s,
                found.bound_s,
                self._incidents,
                _MOST_SLOW,
            )

    def _keep(
        self,
        found: _Found,
        accused: Mapping[str, str],
        failed: Iterable[FailedLink],
        absences: Sequence[Absence] | None = None,
        **facts: Any,
    ) -> asyncio.Future[None]:
        """Keeps what was found, on a thread."""
        return self._aside.on_thread(
            _write,
            self._incidents,
            accused,
            found,
            self._membership.roster,
            absences,
            step=found.last.step + 1,
            generation=found.last.generation,
            no_step_for_s=round(found.no_step_for_s, 1),
            bound_s=round(found.bound_s, 1),
            failed_links=[link._asdict() for link in failed],
            places={
                w: None if p is None else asdict(p) for r in found.places for w, p in r.items()
            },
            **facts,
        )

    async def _some_moved(self, accused: Collection[str], before: _Places) -> bool:
        """Whether one of the accused has moved since that look: taking evidence takes its time."""
        marks = _marks(before)
        now = _marks(await self._places())
        return any(now.get(worker) != marks.get(worker) for worker in accused)

    def _mates(self, workers: Iterable[str]) -> list[str]:
        """All workers of the replicas of `workers`, these first."""
        theirs = set(workers)
        replicas = [r.workers for r in self._membership.roster.replicas if theirs & {*r.workers}]
        return sorted((w for each in replicas for w in each), key=lambda w: w not in theirs)

    @property
    def _bound_s(self) -> float:
        return bound_s(self._least_s, self._steps_s)

    @property
    def _still_s(self) -> float:
        """Since the latest step was committed, or something was done about it. Time in
        which the whole run was paused does not count."""
        return self._agents.awake_s() - self._came_s

    def _over(self, last: _Stand) -> bool:
        """Whether things have moved since: a step, a call, the end."""
        membership = self._membership
        return self._stand != last or membership.stopped is not None or membership.call is not None

    async def _places(self) -> _Places:
        """Of the roster's workers, by replica, or by what is left of one."""
        groups, started = self._membership.roster.groups, self._workers.started
        nodes = {started[w].node for group in groups for w in group if w in started}
        known = await self._agents.places(nodes)
        return [{worker: known.get(worker) for worker in group} for group in groups]

    async def _evidence(
        self, suspects: Sequence[str], others: int = _WAITERS
    ) -> dict[str, Evidence]:
        """Of the suspects, and of some others: those who wait inside their replicas first."""
        roster = self._membership.roster
        near = [r.workers for r in roster.replicas if not set(suspects).isdisjoint(r.workers)]
        nearest = dict.fromkeys([*(w for group in near for w in group), *roster.workers])
        waiters = [w for w in nearest if w not in suspects][: max(others, _WAITERS)]
        started = self._workers.started
        asked = [started[w] for w in (*suspects, *waiters) if w in started]
        return await self._agents.evidence(asked)


def _marks(places: _Places) -> dict[str, int]:
    return {w: p.mark for replica in places for w, p in replica.items() if p is not None}


def _write(
    incidents: Path,
    accused: Mapping[str, str],
    found: _Found,
    roster: Roster,
    absences: Sequence[Absence] | None,
    **facts: Any,
) -> None:
    """As `keep_evidence`, with what the stacks show together, and the recordings (None: nobody has
    looked yet). What goes wrong with that costs these lines, not the rest."""
    seen, whole = found.seen(), {*found.suspects, *found.second}
    if absences is None:
        absences = _find_absences(seen, roster.met)
    stacks: dict[str, Any] = {"seen": len(seen), "workers": len(roster.workers)}
    try:
        texts = {worker: one.stacks for worker, one in seen.items()}
        stacks |= asdict(find_stack_groups(texts, _HOME, roster.met))
    except Exception:  # another release of Python may write them otherwise
        log.warning("what the stacks show together is not understood", exc_info=True)
    keep_evidence(
        incidents,
        accused,
        {w: one if w in whole else _stacks_of(one) for w, one in seen.items()},
        not_arrived=[{"in_words": str(each), **asdict(each)} for each in absences],
        stack_groups=stacks,
        **facts,
    )


def _stacks_of(found: Evidence) -> Evidence:
    """Of the many that are looked at once nothing else is kept: it would be megabytes."""
    return Evidence(stacks=found.stacks)


def _find_absences(
    found: Mapping[str, Evidence], met: Mapping[str, Sequence[str]]
) -> tuple[Absence, ...]:
    """Who has not arrived where. What goes wrong with it costs these words, not the verdict."""
    try:
        return find_absences({w: one.collectives for w, one in found.items()}, met)
    except Exception:  # another release of torch may record other things
        log.warning("what the flight recorders say is not understood", exc_info=True)
        return ()


def _where_absent(worker: str, absences: Iterable[Absence]) -> str:
    """In which collective it has not arrived, in words; empty where its peers' recordings do not
    tell."""
    return next((f"; {each}" for each in absences if worker in each.absent), "")


def _lacks(found: Mapping[str, Evidence], suspects: Sequence[str]) -> bool:
    return not found or not found.keys() >= {*suspects}


def _twice(first: Evidence | None, second: Evidence) -> Evidence:
    """Two looks at one worker: what differs in its stacks moves, what does not stands still."""
    before = "" if first is None else first.stacks
    stacks = f"When it was suspected:\n\n{before}\nLater:\n\n{second.stacks}"
    return replace(second, stacks=stacks)
