"""Finds the workers that are slower than the others, and stay so.

    each beat of a node ──► the paces of its workers
    all workers with lanes have a new one ──► a round: who is slow? (`health/stragglers.py`)
    slow in several rounds running ──► stragglers_found, and evidence in incidents/N/
    slow still, AGAIN_S later ──► stragglers_found

With `health.move_slow` it hands in a verdict, and `remedies.py` has the slow ones leave; else it
tells, and no more.
Nothing is judged while a replica heals: that takes time from those that send and catch up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from elastic.coordinator.agents import NodeAgents
from elastic.coordinator.aside import Aside
from elastic.coordinator.evidence import keep_evidence
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import SLOW
from health.pace import Pace
from health.stragglers import ROUNDS, Blame, Slowness, count_rounds, find_blame, find_slow
from health.verdict import Verdict

AGAIN_S = 6 * 3600.0
"""How often a straggler that stays one is told of: what its verdict counts against its machine has
not quite faded by then."""

_OTHERS = 2
"""Stacks taken of workers that are not slow, beside the stragglers'."""


class SlowWatch:
    """One for the run; it runs on the coordinator's event loop.

    Args:
        incidents: where evidence is kept.
        membership: knows the roster.
        workers: knows whose process is whose.
        agents: tell the paces; asked for stacks.
        records: where it is written down.
        aside: where evidence is gathered.
        meet: takes verdicts against machines; None: nothing follows.
    """

    def __init__(
        self,
        incidents: Path,
        membership: Membership,
        workers: Workers,
        agents: NodeAgents,
        records: RunLog,
        aside: Aside,
        meet: Callable[[Verdict], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._incidents, self._membership, self._workers = incidents, membership, workers
        self._agents, self._records, self._aside = agents, records, aside
        self._meet = meet
        self._names: dict[tuple[str, int], str] = {}
        """Node and process -> worker."""
        self._paces: dict[str, Pace] = {}
        self._fresh: set[str] = set()
        """Workers with a pace that was not judged."""
        self._generation = -1
        self._expected: tuple[str, ...] = ()
        """Workers with lanes in that roster."""
        self._rounds: dict[str, int] = {}
        self._told_s: dict[str, float] = {}
        """When each of the stragglers was told of last, on the monotonic clock."""
        agents.pace_followers.append(self.take)

    def take(self, node: str, paces: Mapping[int, Pace]) -> None:
        """The latest paces of a node's workers, by their processes."""
        self._follow_roster()
        for pid, pace in paces.items():
            worker = self._worker_of(node, pid)
            if worker is not None and self._is_new(worker, pace):
                self._paces[worker] = pace
                self._fresh.add(worker)
        if self._membership.heals.behind or self._membership.call is not None:
            self._fresh = set()
        elif self._is_complete():
            self._judge()

    def _follow_roster(self) -> None:
        """Who is expected to tell. Windows of another roster begin no round."""
        roster = self._membership.roster
        if roster.generation != self._generation:
            self._generation, self._fresh = roster.generation, set()
            self._expected = tuple(
                worker
                for replica in roster.replicas
                if roster.lanes.get(replica.index)
                for worker in replica.workers
            )

    def _worker_of(self, node: str, pid: int) -> str | None:
        started = self._workers.started
        if self._names.get((node, pid)) not in started:  # new, or of one that is lost
            self._names = {(one.node, one.pid): worker for worker, one in started.items()}
        return self._names.get((node, pid))

    def _is_new(self, worker: str, pace: Pace) -> bool:
        before = self._paces.get(worker)
        return before is None or before.number != pace.number

    def _is_complete(self) -> bool:
        """Whether all workers of the roster that have lanes have told of a new window. There are
        thousands of beats a second: who has told is counted first."""
        return (
            len(self._fresh) >= len(self._expected) > 1
            and self._fresh.issuperset(self._expected)
            and self._membership.members.keys() >= set(self._expected)
        )

    def _judge(self) -> None:
        """A round."""
        self._fresh = set()
        slow = find_slow({worker: self._paces[worker] for worker in self._expected})
        self._rounds = count_rounds(self._rounds, slow)
        now_s, before_s = time.monotonic(), self._told_s
        self._told_s = {worker: at_s for worker, at_s in before_s.items() if worker in slow}
        stragglers = [
            worker
            for worker, rounds in self._rounds.items()
            if rounds >= ROUNDS and now_s - self._told_s.get(worker, -inf) >= AGAIN_S
        ]
        if not stragglers:
            return
        self._told_s |= dict.fromkeys(stragglers, now_s)
        nodes = {worker: identity.node for worker, identity in self._membership.members.items()}
        replicas = [replica.workers for replica in self._membership.roster.replicas]
        unit = self._membership.config.dims.unit
        for blame in find_blame(stragglers, slow, replicas, unit, nodes):
            first = before_s.keys().isdisjoint(blame.workers)
            self._tell(blame, slow, nodes, first=first)

    def _tell(
        self,
        blame: Blame,
        slow: Mapping[str, Slowness],
        nodes: Mapping[str, str],
        *,
        first: bool,
    ) -> None:
        step = self._membership.progress.recorded
        event = event_of(blame, slow, self._rounds, step, time.time())
        self._records.note(event)
        if self._meet is not None and blame.nodes:
            self._aside.spawn(self._meet(_verdict(event)))
        if not first:  # of a run only so many folders are kept
            return
        paces = {w: {"node": nodes[w], **asdict(self._paces[w])} for w in self._expected}
        self._aside.spawn(self._keep(event, {w: slow[w].evidence for w in blame.workers}, paces))

    async def _keep(
        self,
        event: events.StragglersFound,
        accused: Mapping[str, str],
        paces: Mapping[str, Mapping[str, object]],
    ) -> None:
        """Keeps what was found, with what the stragglers and some others are doing."""
        started = self._workers.started
        others = [worker for worker in paces if worker not in accused][:_OTHERS]
        asked = [started[worker] for worker in (*accused, *others) if worker in started]
        found = await self._agents.evidence(asked)
        await self._aside.on_thread(
            keep_evidence,
            self._incidents,
            accused,
            found,
            step=event.step,
            generation=self._generation,
            cause="slow",
            nodes=event.nodes,
            part=event.part,
            score=event.score,
            paces=paces,
        )


def event_of(
    blame: Blame,
    slow: Mapping[str, Slowness],
    rounds: Mapping[str, int],
    step: int,
    time_s: float,
) -> events.StragglersFound:
    """What is written down of stragglers that belong together.

    Args:
        blame: they.
        slow: all that are slow in this round.
        rounds: worker -> rounds running in which it was slow.
        step: the latest that was committed.
        time_s: now, in seconds since the epoch.
    """
    worst = min((slow[worker] for worker in blame.workers), key=lambda one: one.score)
    count = f"{len(blame.workers)} worker{'s' if len(blame.workers) > 1 else ''}"
    running = min(rounds[worker] for worker in blame.workers)
    where = "" if blame.nodes else " on several machines, of which one may be slow"
    return events.StragglersFound(
        time=time_s,
        step=step,
        workers=list(blame.workers),
        nodes=list(blame.nodes),
        score=round(worst.score, 3),
        part=worst.part,
        detail=f"{count}{where}, slow in {running} rounds running: {worst.evidence}",
    )


def _verdict(event: events.StragglersFound) -> Verdict:
    return Verdict(
        cause=SLOW,
        workers=tuple(event.workers),
        nodes=tuple(event.nodes),
        evidence=(event.detail,),
        confidence="likely",
        signs=("straggler",),
    )
