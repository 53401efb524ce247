"""A run played through without machines: simulated workers round the real `Membership`.

The world stands in for the coordinator's other parts: it delivers answers, signals, deaths,
receipts and replacements, each whenever a seeded random scheduler says so, and it does harm. What
must hold is in `simulation_checks.py`; a state in which nobody can move is a deadlock, and fails.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from elastic.membership.decisions import GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol.messages import Build, Report, Run, Signal, Stop
from tests.support import simulation_checks as checks
from tests.support.simulated_worker import Applied, Channel, Lost, SimWorker
from trainer.parallel.layout import ParallelDims

Happening = tuple[str, Any, Callable[[Any], bool], Any]
"""Kind, who, what happens (it returns whether anything did), and of whom."""

MOST_EVENTS = 20_000
HESITATION = 0.95
"""How often something else happens before one that is to be killed is killed, if anything can."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One schedule: sizes, and how much goes wrong."""

    seed: int
    max_replicas: int
    min_replicas: int
    workers_per_replica: int
    start_workers: int
    further_workers: int
    """Workers beyond those that the start waits for; whoever comes first is in it."""
    node_workers: int
    """Neighbours in rank on one node."""
    lanes: int
    collectives: int
    """Collectives across replicas in a reduce, and in a restore, one after the other."""
    steps: int
    save_every: int | None
    memory_every: int | None
    kills: int
    """Times that one worker or several are killed."""
    write_offs: int
    """Workers that do not follow a call, and are written off before they are killed."""
    flakes: int
    """Collectives across replicas that fail, and heals that arrive damaged, with nobody dead."""
    retreats: int
    """Times that what all hold is given up for a checkpoint."""
    damages: int
    """Reads of a checkpoint that find it damaged, while there is an earlier one."""
    drains: int
    """Times that a machine, of one worker or two, will go, or that a worker is to end."""
    crashes: int
    """Times that the coordinator is lost, and started anew."""
    mishearings: int
    """Answers to joins that are lost on their way, while the coordinator lives."""
    silent: bool
    """As on NCCL, or of a machine that says nothing, a loss does not wake those who wait for the
    lost: a signal has to."""
    by_priority: bool
    """Whoever has the highest (random, sometimes changing) priority moves, not just anyone."""

    @staticmethod
    def draw(seed: int) -> Plan:
        """The schedule of a seed; one in five is harder on the coordinator, one in five of machines
        with workers of two replicas, of which there are no more, and one in five of replicas that
        begin on several nodes, and of whole nodes that come later."""
        rng = random.Random(seed)
        most, each = rng.randint(1, 4), rng.choice([1, 1, 2, 2, 3, 4])
        least = rng.randint(1, most)
        start = rng.randint(least, most) * each + rng.randint(0, 2)
        machines = random.Random(f"machines of {seed}")
        plan = Plan(
            seed=seed,
            max_replicas=most,
            min_replicas=least,
            workers_per_replica=each,
            start_workers=start,
            further_workers=machines.choice([0, 0, each, 2 * each]),
            node_workers=machines.randint(1, 2 * each),
            lanes=most + rng.choice([0, 0, 3]),
            collectives=rng.choice([1, 2, 4]),
            steps=rng.randint(2, 5),
            save_every=rng.choice([None, 1, 2]),
            memory_every=rng.choice([None, 1, 2]),
            kills=rng.randint(0, 4),
            write_offs=rng.choice([0, 0, 2]),
            flakes=rng.choice([0, 0, 2, 4]),
            drains=rng.choice([0, 0, 1, 3]),
            crashes=rng.choice([0, 0, 0, 1, 2]),
            mishearings=random.Random(f"what {seed} does not hear").choice([0, 0, 1, 3]),
            silent=rng.random() < 0.5,
            by_priority=rng.random() < 0.5,
            damages=rng.choice([0, 1, 3]),
            retreats=random.Random(f"retreats of {seed}").choice([0, 0, 0, 1, 2]),
        )
        if seed % 5 == 1:
            return replace(
                plan,
                max_replicas=2,
                min_replicas=rng.randint(1, 2),
                workers_per_replica=2,
                start_workers=rng.randint(4, 8),
                steps=rng.randint(3, 8),
                kills=rng.randint(0, 1),
                drains=rng.randint(1, 4),
                save_every=rng.choice([None, None, 2, 4]),
            )
        if seed % 5 == 2:
            each = machines.randint(2, 4)
            return replace(
                plan,
                min_replicas=machines.randint(1, plan.max_replicas),
                workers_per_replica=each,
                start_workers=plan.max_replicas * each,
                further_workers=machines.randint(1, 3) * each,
                node_workers=each + machines.choice([0, 0, 1]),
                steps=machines.randint(4, 12),
                kills=machines.randint(0, 2),
            )
        if seed % 5:
            return plan
        return replace(
            plan,
            steps=rng.randint(3, 8),
            kills=rng.randint(0, 4),
            drains=rng.randint(1, 4),
            crashes=rng.randint(1, 4),
            save_every=rng.choice([None, None, 2, 4]),
        )


class World:
    """The coordinator round `Membership`, the network, and the scheduler."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        each, tensor = plan.workers_per_replica, self.rng.randint(1, plan.workers_per_replica)
        tensor = tensor if each % tensor == 0 else 1
        rest = each // tensor
        self.config = GroupConfig(
            max_replicas=plan.max_replicas,
            min_replicas=plan.min_replicas,
            dims=ParallelDims(others=(("context", rest),), tensor=tensor)
            if plan.seed % 2
            else ParallelDims(shard=rest, tensor=tensor),
            lanes=plan.lanes,
            steps=plan.steps,
            start_workers=plan.start_workers,
            max_regroups_without_progress=8 + plan.flakes,
        )
        self.membership = Membership(self.config, Progress())
        self.channels: dict[tuple[Any, ...], Channel] = {}
        self.workers: dict[str, SimWorker] = {}
        self.posted: dict[str, Signal] = {}
        self.dead: set[str] = set()
        """Workers whose process has ended."""
        self.lost: set[str] = set()
        """Workers that the coordinator was told are gone."""
        self._broke: dict[str, set[int]] = {}
        """Worker that is lost -> formations that have lost it."""
        self.cut_off: set[str] = set()
        """Workers that were written off since the newest roster, as their node was not heard."""
        self.taken_back = 0
        """Of these, those whom the next coordinator heard."""
        self.taken_apart: set[str] = set()
        """Workers of replicas that somebody with a part of the last copy was taken out of, that
        made room for what those made, that were being built when the coordinator was lost, or that
        left for one on a single node."""
        self.saved: dict[int, Applied] = {0: ()}
        self.snapshot: tuple[int, Applied] | None = None
        """The newest complete snapshot, which some node of those that hold it has."""
        self.parts: dict[tuple[int, int], dict[int, Applied]] = {}
        self.went_back_in = 0
        self.snapshots_read = self.snapshots_failed = self.checkpoints_failed = 0
        self.damages, self.retreats, self.went_back = plan.damages, plan.retreats, 0
        self._lost_tail = random.Random(f"records that {plan.seed} loses")
        self._cut_off = random.Random(f"whom {plan.seed} does not hear")
        self._retreating = random.Random(f"when {plan.seed} goes back")
        self.repairs = 0
        """Replicas that entered a roster with a part of their state."""
        self.receipts: dict[tuple[int, int], dict[int, Applied]] = {}
        self.log: list[int] = []
        self.recorded = 0
        """Steps that were in the records before the last decision."""
        self.joins: dict[str, tuple[Report, list[tuple[int, int]]]] = {}
        """Calls to join on their way."""
        self.cross_lost: dict[str, int] = {}
        """Worker -> generation: messages on their way that its group across replicas has failed."""
        self.unnoticed: list[str] = []
        """Dead workers that nobody has told the coordinator of."""
        self.to_kill: list[str] = []
        """Workers written off, to be killed."""
        self.vacant: list[int] = list(range(plan.start_workers + plan.further_workers))
        """Ranks that Ray will start a worker for."""
        self.kills, self.write_offs, self.flakes = plan.kills, plan.write_offs, plan.flakes
        self.drains, self.crashes = plan.drains, plan.crashes
        self.mishearings, self._mishearing = (
            plan.mishearings,
            random.Random(f"{plan.seed} mishears"),
        )
        self.unsure: list[SimWorker] = []
        """Workers that the coordinator has answered; it may be lost before they hear it."""
        self.incarnation = 0
        """Coordinators that were lost so far."""
        self.drained: set[str] = set()
        self.going: set[str] = set()
        """Of these, who is to end by itself."""
        self.succeeded: set[str] = set()
        """Of these, in whose place another one starts before it is gone."""
        self.let_go: dict[str, Report] = {}
        """Of these, who was told to since the newest call, while no replica was sure to have state
        and it was not decided whether the survivors make one, and what it had joined with."""
        self.dismissed = self.moves = 0
        self.copies: dict[tuple[int, str], Applied] = {}
        """(generation, worker) -> the state that it sends to newcomers."""
        self.trace: list[str] = []
        self.outcomes: list[str] = []
        self._arrivals = 0
        self._priorities: dict[Any, float] = {}

    @property
    def broken(self) -> set[int]:
        """Formations that have lost a member."""
        return set().union(*self._broke.values())

    # -- machines ----------------------------------------------------------------------------------

    def nodes_of(self, names: Iterable[str]) -> set[str]:
        """The nodes of these workers."""
        return {self.workers[name].identity.node for name in names}

    def split_groups(self, names: Sequence[str]) -> int:
        """Tensor groups of a replica that are on more than one node."""
        tensor = self.config.dims.tensor
        groups = (names[at : at + tensor] for at in range(0, len(names), tensor))
        return sum(len(self.nodes_of(group)) > 1 for group in groups)

    def most_on_a_node(self, names: Iterable[str]) -> int:
        """The most of these workers that are on one node."""
        counts = Counter(self.workers[name].identity.node for name in names)
        return max(counts.values(), default=0)

    # -- the scheduler -----------------------------------------------------------------------------

    def play(self) -> None:
        """Plays the run to its end, and checks it."""
        for _ in range(MOST_EVENTS):
            self._do_harm()
            if not self._one_event():
                break
        else:
            raise AssertionError("the run does not come to an end")
        checks.check_end(self)

    def _one_event(self) -> bool:
        events = list(self._events())
        order = self._by_priority if self.plan.by_priority else self._in_any_order
        if not self.to_kill or self.rng.random() >= HESITATION:
            return any(happens(of) for _, _, happens, of in order(events))
        killed = [event for event in events if event[0] == "execute"]
        others = [event for event in events if event[0] != "execute"]
        return any(happens(of) for _, _, happens, of in chain(order(others), order(killed)))

    def _by_priority(self, events: list[Happening]) -> Iterable[Happening]:
        priorities = self._priorities
        if priorities and self.rng.random() < 0.05:
            priorities[self.rng.choice(list(priorities))] = self.rng.random()
        for event in events:
            if event[:2] not in priorities:
                priorities[event[:2]] = self.rng.random()
        return sorted(events, key=lambda event: priorities[event[:2]])

    def _in_any_order(self, events: list[Happening]) -> Iterable[Happening]:
        """Shuffled as far as it is read."""
        while events:
            at = int(self.rng.random() * len(events))
            events[at], events[-1] = events[-1], events[at]
            yield events.pop()

    def _events(self) -> Iterator[Happening]:
        for name, worker in self.workers.items():
            if worker.done or name in self.dead:
                continue
            if worker.answer is not None or not worker.waits_for_answer:
                yield "move", name, self._move, worker
            if name in self.posted and self.posted[name].serial > worker.heard:
                yield "hear", name, self._hear, worker
            if worker.side and not worker.side_built:
                yield "beside", name, self._builds_beside, worker
            if worker.writing is not None:
                yield "write", name, self._written, worker
            if worker.source is not None and worker.arrived is None:
                yield "state", name, self._state_arrives, worker
            if worker.remembering is not None:
                yield "remember", name, self._remembered, worker
            if worker.records and worker.run is not None and worker.run.lead:
                yield "flush", name, self._flush, worker
        for name in self.joins:
            yield "join", name, self._join, name
        for name in self.cross_lost:
            yield "cross_lost", name, self._cross_lost, name
        for name in self.unnoticed:
            yield "notice", name, self._notice, name
        for name in self.to_kill:
            yield "execute", name, self._execute, name
        for rank in self.vacant:
            yield "arrive", rank, self._arrive, rank
        for attempt, parts in self.receipts.items():
            if len(parts) == self.plan.workers_per_replica:
                yield "commit", attempt, self._checkpoint, attempt
        for attempt, parts in self.parts.items():
            if len(parts) == self.plan.workers_per_replica:
                yield "complete", attempt, self._complete, attempt

    def _flush(self, worker: SimWorker) -> bool:
        worker.flush()
        return True

    def _builds_beside(self, worker: SimWorker) -> bool:
        if not worker.builds_beside():
            return False
        if worker.side_built:
            self.trace.append(f"{worker.name} has built {worker.side}")
            self.membership.built(worker.name, worker.side)
            self._advance()
        return True

    def _state_arrives(self, worker: SimWorker) -> bool:
        source = worker.source
        if source not in self.copies or source[1] in self.dead or worker.heal_failed:
            return False
        if self.flake():
            worker.heal_failed = True
        else:
            worker.arrived = self.copies[source]
        return True

    def _move(self, worker: SimWorker) -> bool:
        wait = worker.wait
        fails = wait.fails() or (wait.crosses and self.rng.random() < 0.05 and self.flake())
        ready = wait.ready()
        if not ready and not fails:
            return False
        fails = fails and (not ready or self.rng.random() < 0.5)
        self.trace.append(f"{worker.name} {wait.what}{' LOST' if fails else ''}")
        try:
            if fails:
                worker.wait = worker.life.throw(Lost())
            else:
                worker.wait = worker.life.send(None if wait.what == "birth" else wait.result())
        except StopIteration:
            worker.done = True
        return True

    # -- what goes wrong ---------------------------------------------------------------------------

    def flake(self) -> bool:
        """Whether something fails now for no reason."""
        if self.flakes == 0 or self.rng.random() < 0.5:
            return False
        self.flakes -= 1
        return True

    def _do_harm(self) -> None:
        if self.kills and self.rng.random() < 0.02:
            self.kills -= 1
            for name in self._victims():
                self.kill(name)
        if self.crashes and self.rng.random() < 0.02 and self.membership.stopped is None:
            self.crashes -= 1
            self._crash()
        if self.mishearings and self._mishearing.random() < 0.02:
            self._lose_an_answer()
        if self.drains and self.rng.random() < 0.02 and self.membership.stopped is None:
            self.drains -= 1
            self._drain()
        if self.retreats and self._retreating.random() < 0.02:
            self._retreat()
        if self.snapshot is not None and self.rng.random() < 0.01:
            self.trace.append("LOSE THE SNAPSHOT")
            self._set_snapshot(None)
        if self.write_offs and self.membership.call == "fault" and self.rng.random() < 0.2:
            absent = sorted(self.membership.calls.unfollowed.keys() - self.dead)
            if absent:
                self.write_offs -= 1
                self._write_off(self.rng.choice(absent))

    def _crash(self) -> None:
        """The coordinator is lost with all it knows, and started anew: `Failover`."""
        self.trace.append("COORDINATOR LOST")
        self.incarnation += 1
        alive = [w for n, w in self.workers.items() if n not in self.dead and not w.done]
        for name in sorted({w.name for w in alive} & self.cut_off):
            self._take_back(name)
        before = self.membership
        self.membership = Membership(
            self.config, Progress(restore_step=max(self.saved)), meet=("", self.incarnation)
        )
        self._set_snapshot(self.snapshot)
        self.posted.clear()
        self._lose_answers()
        self.joins.clear()
        standings = [worker.standing() for worker in alive if worker.name not in self.lost]
        taken = {s.replica for s in standings if s.generation}
        """By replicas of a roster. One that had left may be the newest that is whole."""
        given_up = {
            s.formed
            for s in standings
            if not s.built
            or (not s.generation and (s.replica in taken or s.replica >= self.plan.max_replicas))
        }
        self.taken_apart.update(s.identity.worker for s in standings if s.formed in given_up)
        # The records may end before those that only the living know of.
        gone = [w for n, w in self.workers.items() if n in self.dead | self.lost or w.done]
        recorded = max([*self.broken, *(worker.standing().formed for worker in gone)], default=0)
        self.membership.resume(
            standings,
            generation=before.progress.generation,
            restored=self.went_back_in,
            formations=self._lost_tail.choice([recorded, before.formations.begun]),
            recorded=before.progress.recorded,
            began=before.progress.began,
            lost=self.lost,
        )
        if before.progress.going_back:
            self.membership.go_back(before.progress.restore_step)
            self._set_snapshot(self.snapshot)
        for name in self.drained - self.lost:
            self.membership.drain(name, dismiss=name in self.going)
        for worker in alive:
            # The last coordinator took its replica for broken, and this one does not. `Troubles`
            # takes it for the culprit, then.
            if worker.replica_aborted and not self.membership.replica_broken(worker.name):
                self.to_kill.append(worker.name)
                self._lose(worker.name)
        self.cross_lost.clear()
        for worker in alive:  # calls that were lost with it are made again
            if worker.waits_for_answer and worker.answer is None:
                self.send_join(worker)
            if worker.cross_lost is not None:
                self.send_cross_lost(worker)
        self._advance()

    def _retreat(self) -> None:
        """All are to go back to some checkpoint: `Retreat`."""
        membership = self.membership
        if membership.stopped is not None or membership.progress.generation == 0:
            return
        self.retreats, self.went_back = self.retreats - 1, self.went_back + 1
        step = self._retreating.choice(sorted(self.saved))
        self.trace.append(f"GO BACK to {step}")
        self.saved = {s: applied for s, applied in self.saved.items() if s <= step}
        membership.go_back(step)
        # What a worker of this generation still has, or saves, does not count.
        self._went_back(step, membership.progress.since)
        self._set_snapshot(self.snapshot)
        self._advance()

    def _lose_answers(self) -> None:
        """Some answers of a coordinator that is lost reach their workers, others do not."""
        for worker in self.unsure:
            if worker.waits_for_answer and self.rng.random() < 0.5:
                self.trace.append(f"{worker.name} does not get {worker.answer}")
                worker.answer = None
        self.unsure.clear()

    def _lose_an_answer(self) -> None:
        """A connection breaks, and its worker makes the call again: `Remote.call`."""
        waiting = [w for w in self.unsure if w.waits_for_answer and w.answer is not None]
        alive = [w for w in waiting if w.name not in self.dead]
        if alive:
            self.mishearings -= 1
            worker = self._mishearing.choice(alive)
            self.trace.append(f"{worker.name} does not get {worker.answer}, and asks again")
            worker.answer = None
            self.send_join(worker)

    def _drain(self) -> None:
        """A worker is to end; or a machine is to go, and another one may be there by then."""
        members = self.membership.members
        alive = sorted(n for n in members if n not in self.dead | self.lost | self.drained)
        if not alive:
            return
        ends, succeeded = self.rng.random() < 0.3, self.rng.random() < 0.5
        count = 1 if ends else self.rng.randint(1, min(2, len(alive)))
        for name in self.rng.sample(alive, count):
            self.trace.append(f"DRAIN {name}")
            self.drained.add(name)
            if ends:
                self.going.add(name)
            else:
                self.to_kill.append(name)
            if succeeded and not ends:
                self.succeeded.add(name)
                self.vacant.append(self.workers[name].rank)
            self.membership.drain(name, dismiss=ends)
        self._advance()

    def _victims(self) -> list[str]:
        alive = [n for n, worker in self.workers.items() if n not in self.dead and not worker.done]
        if not alive:
            return []
        chance = self.rng.random()
        if chance < 0.1:
            return alive
        if chance < 0.3:
            in_commit = [n for n in alive if "commit" in self.workers[n].wait.what]
            return in_commit[:1] or alive[:1]
        first = self.rng.choice(alive)
        if chance < 0.5:
            replica = self.membership.roster.replica_of(first)
            return [n for n in (replica.workers if replica else (first,)) if n in alive]
        return [first]

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        self.trace.append(f"KILL {name} in {worker.wait.what}")
        self.dead.add(name)
        worker.life.close()
        self.unnoticed.append(name)
        self._vacate(worker)

    def _vacate(self, worker: SimWorker) -> None:
        """Ray starts another one in its place, unless it has done so before."""
        if worker.name not in self.succeeded:
            self.vacant.append(worker.rank)

    def _write_off(self, name: str) -> None:
        """As `Workers.lose_laggards`: lost at once, killed a little later."""
        self.trace.append(f"WRITE OFF {name}")
        self.to_kill.append(name)
        if self._cut_off.random() < 0.5:
            self.cut_off.add(name)
        self._lose(name)

    def _take_back(self, name: str) -> None:
        """No roster has gone on without it: `Replay.cut_off`."""
        self.trace.append(f"TAKE BACK {name}")
        self.taken_back += 1
        self.to_kill.remove(name)
        self.lost.remove(name)
        self.cut_off.remove(name)
        del self._broke[name]

    def _execute(self, name: str) -> bool:
        self.to_kill.remove(name)
        self.trace.append(f"execute {name}")
        if name not in self.dead and not self.workers[name].done:
            self.kill(name)
        return True

    def peer_lost(self, worker: SimWorker) -> bool:
        """As the coordinator's `trouble`."""
        return self.membership.replica_broken(worker.name)

    def caught_up(self, worker: SimWorker) -> None:
        self.membership.caught_up(worker.name)
        self._advance()

    def heal_failed(self, worker: SimWorker) -> None:
        if self.membership.heals.failed(worker.name) >= 3:
            self.to_kill.append(worker.name)
            self._lose(worker.name)
        self._advance()

    def any_gone(self, channel: Channel) -> bool:
        return any(name in self.dead or name in channel.closed for name in channel.members)

    # -- the coordinator ---------------------------------------------------------------------------

    def send_join(self, worker: SimWorker) -> None:
        self.joins[worker.name] = (worker.report(), worker.recent())

    def _join(self, name: str) -> bool:
        """A call to join arrives; its worker may be dead by now."""
        report, recent = self.joins.pop(name)
        self.record(recent)
        before = self.membership.places
        placed = [*before.standing.values(), *before.forming.values()]
        self.membership.join(report)
        left = self.membership.formations.present
        for replica in placed:
            if replica.formed not in left:
                self.channels["replica", replica.formed].given_up = True
                self.taken_apart.update(replica.workers)
        self._advance(report)
        return True

    def send_cross_lost(self, worker: SimWorker) -> None:
        assert worker.cross_lost is not None
        self.cross_lost[worker.name] = worker.cross_lost

    def _cross_lost(self, name: str) -> bool:
        self.membership.cross_lost(self.cross_lost.pop(name), "a connection was reset")
        self._advance()
        return True

    def record(self, steps: list[tuple[int, int]]) -> None:
        """As `RunLog.take_steps`."""
        for step, generation in [] if self.membership.progress.going_back else steps:
            if self.membership.progress.awaits(step, generation):
                self.membership.progress.record(step)
                self.log.append(step)

    def left(self, worker: SimWorker, stop: Stop) -> None:
        """A worker returns from its train function; while the run goes on, Ray starts another."""
        if self.membership.stopped is not None:
            return
        self._vacate(worker)
        if stop.error is None:
            # A coordinator started anew does not know of the answer, and may write it off.
            assert worker.name in self.going
            assert worker.name not in self.lost or self.incarnation
            self.dismissed += 1
            self.unnoticed.append(worker.name)
        elif worker.name not in self.lost:
            assert self.taken_back, "it has heard of its loss from the coordinator before"
            self.unnoticed.append(worker.name)

    def _arrive(self, rank: int) -> bool:
        self.vacant.remove(rank)
        self._arrivals += 1
        name = f"w{self._arrivals}"
        self.workers[name] = worker = SimWorker(
            self, name, rank, f"n{rank // self.plan.node_workers}"
        )
        worker.wait = next(worker.life)
        return True

    def _notice(self, name: str) -> bool:
        self.trace.append(f"notice {name}")
        self.unnoticed.remove(name)
        self._lose(name)
        return True

    def _lose(self, name: str) -> None:
        self.lost.add(name)
        replicas = (*self.membership.roster.replicas, *self.membership.places.forming.values())
        self._broke[name] = {r.formed for r in replicas if name in r.workers}
        if self.membership.lose(name) is not None and self.membership.stopped is None:
            self._advance()

    def _hear(self, worker: SimWorker) -> bool:
        signal = self.posted[worker.name]
        self.trace.append(f"{worker.name} hears {signal}")
        worker.heard = worker.called[signal.kind] = signal.serial
        if signal.broken and signal.serial > worker.settled and self.plan.silent:
            worker.replica_aborted = worker.built > 0
        return True

    def _written(self, worker: SimWorker) -> bool:
        assert worker.writing is not None
        step, generation, rank, applied = worker.writing
        worker.writing = None
        worker.flush()
        if generation >= self.went_back_in and not self.membership.progress.ahead(step, generation):
            self.receipts.setdefault((step, generation), {})[rank] = applied
        return True

    def _checkpoint(self, attempt: tuple[int, int]) -> bool:
        parts = self.receipts.pop(attempt)
        if attempt[0] not in self.saved:
            assert len(set(parts.values())) == 1, "a checkpoint of two states"
            self.saved[attempt[0]] = parts[0]
            self.membership.progress.checkpointed(attempt[0])
            self._advance()
        return True

    # -- elastic/coordinator/snapshots.py --------------------------------------------------------

    def _remembered(self, worker: SimWorker) -> bool:
        assert worker.remembering is not None
        step, generation, rank, applied = worker.remembering
        worker.remembering = None
        worker.flush()
        if generation >= self.went_back_in and not self.membership.progress.ahead(step, generation):
            self.parts.setdefault((step, generation), {})[rank] = applied
        return True

    def _complete(self, attempt: tuple[int, int]) -> bool:
        parts = self.parts.pop(attempt)
        assert len(set(parts.values())) == 1, "a snapshot of two states"
        if self.snapshot is None or attempt[0] > self.snapshot[0]:
            self._set_snapshot((attempt[0], parts[0]))
        return True

    def read(self, run: Run) -> Applied | None:
        """A worker reads what it is to restore; None where it cannot."""
        if run.source == "store":
            earlier = [step for step in self.saved if 0 < step < run.step]
            if self.damages and earlier and self.rng.random() < 0.5:
                self.damages -= 1
                return None
            return self.saved.get(run.step)  # given up by others of an older roster
        damaged = self.rng.random() < 0.5
        if self.snapshot is not None and self.snapshot[0] == run.step and not damaged:
            self.snapshots_read += 1
            return self.snapshot[1]
        return None

    def unreadable(self, run: Run) -> None:
        """All have given up what they were to restore, and one that could not read it says so."""
        if run.source == "memory":
            self.snapshots_failed += 1
            if self.snapshot is not None and self.snapshot[0] == run.step:
                self._set_snapshot(None)
            return
        current = self.membership.progress.restore_step == run.step
        if current and self.membership.progress.generation == run.generation:
            self.checkpoints_failed += 1
            del self.saved[run.step]
            self.membership.progress.checkpoint_lost(newest=max(self.saved), reason="damaged")
            self._advance()

    def _set_snapshot(self, snapshot: tuple[int, Applied] | None) -> None:
        self.snapshot = snapshot
        self.membership.progress.snapshotted(0 if snapshot is None else snapshot[0])

    def _went_back(self, step: int, generation: int) -> None:
        self.went_back_in = generation
        self.parts.clear()
        self.receipts.clear()
        if self.snapshot is not None and self.snapshot[0] > step:
            self._set_snapshot(None)

    def _advance(self, *joined: Report) -> None:
        """What follows of the facts; `joined` may be refused, and wait for that."""
        before, self.recorded = (
            self.membership.progress.generation,
            self.membership.progress.recorded,
        )
        reports = self.membership.waiting | {r.identity.worker: r for r in joined}
        places = self.membership.places
        placed = (*places.standing.values(), *places.forming.values())
        repairs = [r for r in placed if not places.survivors.isdisjoint(r.workers)]
        source = bool(places.standing.keys() - self.membership.heals.behind)
        effects = self.membership.advance()
        checks.check_effects(self, effects, reports, before)
        for replica in effects.formed:
            self.channels["replica", replica.formed] = Channel(replica.workers)
        if effects.regrouped is not None:
            self.cut_off.clear()
            roster = effects.regrouped.roster
            if effects.regrouped.outcome in ("start", "restore"):
                self._went_back(effects.regrouped.step, roster.generation)
            self.trace.append(f"ROSTER {effects.regrouped}")
            places = self.membership.places
            there = self.broken | places.standing.keys() | places.forming.keys()
            for replica in placed:
                if replica.formed not in there and self.drained.isdisjoint(replica.workers):
                    self.moves += 1
                    self.taken_apart.update(replica.workers)
            self.outcomes.append(effects.regrouped.outcome)
            for rank in range(self.plan.workers_per_replica):
                members = tuple(roster.column(rank))
                self.channels["cross", roster.generation, rank] = Channel(members)
        self.posted.update(effects.signals)
        if effects.called is not None or effects.regrouped is not None:
            self.let_go.clear()
        undecided = not (source or self.membership.formations.reassembled)
        for name, answer in effects.answers.items():
            if undecided and isinstance(answer, Stop) and name in self.going - self.lost:
                self.let_go[name] = reports[name]
            worker = self.workers[name]
            worker.answer = answer
            self.unsure.append(worker)
            if isinstance(answer, Build) and answer.keep and worker.replica is not None:
                self.taken_apart.update(worker.replica.members)
        left = places.standing.keys() | places.forming.keys()
        keeps = any(isinstance(a, Build) and a.keep for a in effects.answers.values())
        given_up = repairs if source and not keeps else placed
        for replica in given_up:
            if replica.formed not in left:
                self.channels["replica", replica.formed].given_up = True


def play(seed: int) -> World:
    """Plays the schedule of `seed`; an AssertionError tells the seed and what led to it."""
    world = World(Plan.draw(seed))
    try:
        world.play()
    except AssertionError as error:
        story = "\n".join(world.trace[-60:])
        raise AssertionError(f"{error}\n{world.plan}\n{story}") from error
    return world
