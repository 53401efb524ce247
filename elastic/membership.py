"""The coordinator's state machine: who is there, who is called, and when the next roster stands.

No Ray, no clock, no file in it: `join` and `lose` take in facts, and `advance` answers with what to
do about them. So every order of arrivals and losses can be played through in a unit test.

    start ──► all formed replicas ready ──► roster
    roster ── a member is lost, or leaves by itself ──► call "fault" ──► all of the whole replicas
              are here ──► roster
    roster ── a formed replica is ready, a newcomer has caught up, a machine is to go ──►
              call "boundary" ──► all are here, after the same commit ──► roster

Workers without a slot (spares, survivors of a broken replica, replacements) wait in the pool;
whenever the pool holds enough for a missing replica, one is formed while the others train. It
enters the roster as a newcomer: without lanes, until it has the state of a healthy one. Where no
replica is left whole, the survivors may still hold a whole copy between them: then they are put
together into one (`salvage.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from elastic.events import RegroupReason
from elastic.messages import (
    Answer,
    Build,
    Identity,
    Packed,
    Report,
    Run,
    Signal,
    SignalKind,
    Standing,
    Stop,
)
from elastic.places import Places
from elastic.resumption import plan_resumption
from elastic.roster import Replica, Roster, next_roster, plan_formations, plan_heals
from elastic.salvage import plan_salvage
from trainer.commit import Commit
from trainer.parallel.layout import slot_of

Call = Literal["start", "fault", "boundary"]
Outcome = Literal["start", "repeat", "finish_step", "boundary", "restore"]


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """The sizes that membership needs to know."""

    max_replicas: int
    """Most replicas of the run."""
    min_replicas: int
    """Fewest to train with."""
    workers_per_replica: int
    """Shard x tensor degree."""
    tensor: int
    """Tensor degree."""
    lanes: int
    """Lanes of the run."""
    steps: int
    """Steps of the run."""
    start_workers: int
    """Workers to wait for at the start, so that neighbours end up in one replica."""


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A new roster stands."""

    roster: Roster
    """It."""
    step: int
    """Where everybody goes on."""
    outcome: Outcome
    """What became of the interrupted step."""
    lost_steps: int
    """Committed steps that must be done again."""


@dataclass(kw_only=True)
class Effects:
    """What `advance` asks the coordinator to do."""

    answers: dict[str, Answer] = field(default_factory=dict)
    """Worker waiting in join -> its answer."""
    signals: dict[str, Signal] = field(default_factory=dict)
    """Working worker -> call."""
    called: RegroupReason | None = None
    """A regroup was called just now, and why."""
    formed: list[Replica] = field(default_factory=list)
    """Replicas that began to form."""
    regrouped: Regrouped | None = None
    """The roster that came of it."""
    short_of: int = 0
    """Workers missing to reach `min_replicas`, while everybody waits for them."""


class Membership:
    """See the module. All methods are immediate.

    Args:
        config: sizes.
        generation: the last generation that anything was written under, 0 for a new run.
        restore_step: step of the newest checkpoint, 0 without one; updated by `checkpointed`.
        snapshot_step: step of the newest readable snapshot, 0 without one; see `snapshotted`.
    """

    def __init__(
        self, config: GroupConfig, *, generation: int, restore_step: int, snapshot_step: int = 0
    ) -> None:
        self.config, self.generation = config, generation
        self.restore_step, self.snapshot_step = restore_step, snapshot_step
        self.recorded = self.reached = max(restore_step, snapshot_step)
        self.members: dict[str, Identity] = {}
        self.waiting: dict[str, Report] = {}
        self.roster = Roster(generation=generation, replicas=(), lanes={})
        self.call: Call | None = "start"
        self.stopped: Stop | None = None
        self.meet = ("", 0)
        """Host and port of the store where process groups meet."""
        self._places = Places(self.waiting.keys())
        self._leaving = self._finishing = self._dismissed = False
        self._broken: list[Replica] = []  # formations that nobody has been told of
        self._formations = self._resumed_formations = 0
        self._serials: dict[str, int] = {}
        self._lost: set[str] = set()
        self._late: set[str] = set()  # lost, and waiting
        self.called_away: dict[str, int] = {}
        """Workers that were signalled and have not joined since, with the first such signal."""
        self._behind: dict[str, int] = {}  # newcomer's worker without state yet -> formation
        self._newcomers: set[int] = set()  # formations that entered this roster without state
        self._failed_heals: dict[int, int] = {}
        self._heals: tuple[tuple[int, int], ...] = ()
        self._heal_again = self._salvaged = False
        self._outdated: set[str] = set()  # what they may hold is of steps that were given up

    # -- facts -------------------------------------------------------------------------------------

    def join(self, report: Report) -> None:
        """A worker is here and waits."""
        worker = report.identity.worker
        self.waiting[worker] = report
        self.called_away.pop(worker, None)
        if worker in self._lost:
            self._late.add(worker)
            return
        self.members[worker] = report.identity
        self.reached = max(self.reached, report.step or 0)
        self._places.arrive(worker, report.built)
        if self._places.stands(worker):
            at_work = not report.finished and (report.in_step or self.call is None)
            self._leaving |= at_work or (report.step is None and worker not in self._behind)
            self._finishing |= report.finished

    def lose(self, worker: str) -> Identity | None:
        """A worker is gone, for good. Returns who it was, None where it was no member."""
        self._lost.add(worker)
        self.called_away.pop(worker, None)
        self.waiting.pop(worker, None)
        self._late.discard(worker)
        self._give_up(self._places.lose(worker))
        self._salvaged = False
        return self.members.pop(worker, None)

    def drain(self, worker: str) -> None:
        """The machine of a worker will go: it gets no slot any more, and leaves the one it has at a
        step boundary, as soon as enough other replicas are whole."""
        self._give_up(self._places.retire(worker))

    def caught_up(self, worker: str) -> Replica | None:
        """A newcomer's worker has the state. Returns its replica where it was the last of it."""
        formed = self._behind.pop(worker, None)
        if formed is None or formed in self._behind.values():
            return None
        return self._places.of(worker)

    def heal_failed(self, worker: str) -> int:
        """A newcomer's worker did not get the state. Returns how often that has happened to its
        replica."""
        formed = self._behind.get(worker)
        if formed is None:
            return 0
        if not self._heal_again:
            self._failed_heals[formed] = self._failed_heals.get(formed, 0) + 1
        self._heal_again = True
        return self._failed_heals.get(formed, 0)

    def checkpointed(self, step: int) -> None:
        """A checkpoint of `step` is committed."""
        self.restore_step = max(self.restore_step, step)

    def snapshotted(self, step: int) -> None:
        """The newest snapshot that can be read is of `step`; 0: there is none (any more)."""
        self.snapshot_step = step

    def laggards(self, signals: Mapping[str, Signal]) -> list[str]:
        """Those who have followed neither the signal that they were sent nor a later one. Who has
        joined in between has followed, though it may be called again by now."""
        return sorted(
            worker
            for worker, signal in signals.items()
            if self.called_away.get(worker, signal.serial + 1) <= signal.serial
        )

    def slot_name(self, worker: str) -> str | None:
        """The slot of a worker in words; None for a worker without one."""
        replica = self.roster.replica_of(worker)
        if replica is None:
            return None
        return str(slot_of(replica.index, replica.workers.index(worker), self.config.tensor))

    def replica_broken(self, worker: str) -> bool:
        """Whether the replica that `worker` works in, standing or forming, is no more."""
        return self.stopped is not None or self._places.of(worker) is None

    def a_spare(self) -> str | None:
        """A worker that waits without a slot."""
        return min(self._places.idle, default=None)

    def source_of(self, worker: str) -> int | None:
        """Number of the replica that a newcomer's worker heals from."""
        replica = self._places.of(worker)
        numbers = [other.index for other in self.roster.replicas]
        if replica is None or replica.index not in numbers:
            return None
        source = dict(self._heals).get(numbers.index(replica.index))
        return None if source is None else numbers[source]

    @property
    def settled(self) -> bool:
        """Whether everybody with a slot has state, and nobody is called away."""
        return self.call is None and not self._behind

    @property
    def whole_replicas(self) -> int:
        """Replicas that train, or would if there were enough of them."""
        return len(self._places.standing) + len(self._places.forming)

    @property
    def forming(self) -> tuple[Replica, ...]:
        """Replicas that form, the oldest first."""
        return tuple(self._places.forming.values())

    def resume(
        self, standings: Sequence[Standing], *, generation: int, formations: int, recorded: int
    ) -> None:
        """Takes up a run whose coordinator was lost, from what its workers know.

        Where they all stand in one whole roster, nothing is called and no step stops. Workers that
        wait join once more after this.

        Args:
            standings: of all living workers.
            generation: of the newest roster in the records, 0 where none stood yet.
            formations: replicas that ever began to form.
            recorded: steps that the run's records hold.
        """
        self.members = {s.identity.worker: s.identity for s in standings}
        self._serials = {s.identity.worker: s.serial for s in standings}
        self._formations = self._resumed_formations = formations
        self.recorded, self.reached = recorded, max(recorded, self.reached)
        found = plan_resumption(standings, self.config.workers_per_replica)
        started = generation > 0 or found.roster.generation > 0
        self.generation = max(self.generation, generation, found.roster.generation)
        self.roster = found.roster
        self._places.form((*found.standing, *found.forming))
        self._places.seat(found.standing)
        self._broken.extend(found.broken)
        self._newcomers, self._behind = set(found.newcomers), dict(found.behind)
        self._heals = found.heals
        self.call = None if started else "start"
        self._leaving = started and not found.consistent

    def give_up_formation(self, worker: str) -> bool:
        """A worker failed to build a replica whose process group was to meet at the coordinator
        that was lost: its workers are free again. Returns whether it is such a one."""
        replica = self._places.of(worker)
        if replica is None or replica.formed > self._resumed_formations:
            return False
        return self._give_up(self._places.give_up(worker))

    # -- decisions ---------------------------------------------------------------------------------

    def advance(self) -> Effects:
        """Everything that follows from the facts so far."""
        effects = Effects()
        if self.stopped is None and self._all_finished():
            self.stopped = Stop(error=None)
        if self.stopped is not None:
            effects.answers = dict.fromkeys(self.waiting, self.stopped)
            self._dismiss(effects)
            self.waiting.clear()
            return effects
        self._turn_away(effects)
        self._free_survivors(effects)
        self._call(effects)
        if self._salvage(effects):
            self._form(effects)
            self._conclude(effects)
            self._form(effects)  # a replica that has left made room
        return effects

    def _all_finished(self) -> bool:
        """Everybody with a slot is done, and the last state is in a committed checkpoint."""
        places = self._places
        return (
            self.restore_step >= self.config.steps
            and bool(places.standing)
            and not places.absent
            and all(self.waiting[w].finished for r in places.standing.values() for w in r.workers)
        )

    def _dismiss(self, effects: Effects) -> None:
        """The run is over: those at work may wait for one that is gone."""
        if not self._dismissed:
            for worker in self.members.keys() - self.waiting.keys():
                self._signal(worker, "fault", effects)
        self._dismissed = True

    def _turn_away(self, effects: Effects) -> None:
        """A worker that was written off but lives (or whose join outlived it) must leave."""
        for worker in self._late:
            effects.answers[worker] = Stop(error="this worker was written off; it is replaced")
            del self.waiting[worker]
        self._late.clear()

    def _free_survivors(self, effects: Effects) -> None:
        """Calls those who build for a replica that will not come about."""
        for replica in self._broken:
            for worker in replica.workers:
                if worker in self.members and worker not in self.waiting:
                    self._signal(worker, "fault", effects)
        self._broken.clear()

    def _form(self, effects: Effects) -> None:
        places = self._places
        least = self.config.start_workers if self._formations == 0 else 1
        if len(places.idle) < max(least, self.config.workers_per_replica):
            return
        if self.whole_replicas >= self.config.max_replicas:
            return
        pool = sorted(places.idle, key=lambda worker: (self.members[worker].rank, worker))
        self._build(pool, effects, keep=False)

    def _salvage(self, effects: Effects) -> bool:
        """Where no whole replica is left, makes one of the survivors, if they hold a whole copy
        between them. Returns whether that is decided: it waits for all of them."""
        if self.call != "fault" or self._places.standing or self._salvaged:
            return True
        living = (worker for worker in self.roster.workers if worker in self.members)
        if any(worker not in self.waiting for worker in living):
            return False
        self._salvaged = True
        reports = [self.waiting[w] for w in sorted(self._places.idle - self._outdated)]
        workers = plan_salvage(reports, self.config.workers_per_replica)
        self._build(workers, effects, keep=True)
        return True

    def _build(self, pool: Sequence[str], effects: Effects, *, keep: bool) -> None:
        places = self._places
        replicas = plan_formations(
            pool=pool,
            taken={r.index for r in (*places.standing.values(), *places.forming.values())},
            max_replicas=self.config.max_replicas,
            workers_per_replica=self.config.workers_per_replica,
            next_number=self._formations + 1,
        )
        self._formations += len(replicas)
        places.form(replicas)
        effects.formed.extend(replicas)
        for replica in replicas:
            for rank, worker in enumerate(replica.workers):
                effects.answers[worker] = Build(
                    formed=replica.formed,
                    replica=replica.index,
                    rank=rank,
                    step=self.reached,
                    keep=keep,
                    meet=self.meet,
                    serial=self._settle(worker),
                )
                del self.waiting[worker]

    def _call(self, effects: Effects) -> None:
        broken = len(self._places.standing) < len(self.roster.replicas)
        if self.call in (None, "boundary") and (broken or self._leaving):
            effects.called = "fault"
            self._signal_roster("fault", effects)
        elif self.call is None and not self._finishing:
            effects.called = self._planned()
            if effects.called is not None:
                self._signal_roster("boundary", effects)

    def _planned(self) -> RegroupReason | None:
        """Why to regroup after a step. A heal is not disturbed for a replica that could join
        later."""
        if self._doomed():
            return "drain"
        if self._heal_again:
            return "heal"
        if self._behind:
            return None
        ready = len(self._places.forming) > self._places.unready
        return "heal" if self._newcomers else "grow" if ready else None

    def _doomed(self) -> list[Replica]:
        """Replicas on machines that will go and that the others can do without."""
        places = self._places
        if not places.retired:
            return []
        doomed = [r for r in places.standing.values() if not places.retired.isdisjoint(r.workers)]
        gone = {replica.formed for replica in doomed} | set(self._behind.values())
        remaining = sum(formed not in gone for formed in places.standing)
        return doomed if remaining >= max(1, self.config.min_replicas) else []

    def _signal_roster(self, kind: SignalKind, effects: Effects) -> None:
        """Calls all who have a slot, survivors of broken replicas too: they may wait for others."""
        self.call = kind
        for worker in self.roster.workers:
            if worker in self.members and worker not in self.waiting:
                self._signal(worker, kind, effects)

    def _conclude(self, effects: Effects) -> None:
        places = self._places
        if self.call is None or places.absent:
            return
        whole = self.whole_replicas
        missing = whole - places.unready < self.config.min_replicas
        if missing or (not places.standing and places.unready):
            here = len(places.idle) + whole * self.config.workers_per_replica
            needed = self.config.min_replicas * self.config.workers_per_replica
            effects.short_of = 0 if self._formations == 0 else max(0, needed - here)
            return
        doomed = {replica.formed for replica in self._doomed()}
        standing = [r for r in places.standing.values() if r.formed not in doomed]
        self._regroup(standing, places.ready, effects)

    def _regroup(self, standing: list[Replica], ready: list[Replica], effects: Effects) -> None:
        able = [*standing, *ready]
        staying = [r for r in able if all(self.waiting[w].step is not None for w in r.workers)]
        stays = {replica.formed for replica in staying}
        joining = [r for r in able if r.formed not in stays]
        reports = [self.waiting[w] for r in able for w in r.workers] if staying else []
        step, commit, outcome = self._resolve([r for r in reports if r.step is not None])
        lost = max(0, self.reached - step) if outcome == "restore" else 0
        if not staying:
            self.recorded = self.reached = step
        self.generation += 1
        self.roster = next_roster(
            generation=self.generation,
            staying=staying,
            joining=joining,
            total_lanes=self.config.lanes,
            lanes_before=self.roster.lanes if self.call == "fault" and staying else None,
        )
        if not staying:
            self._outdated = set(self.members)
        self._outdated.difference_update(self.roster.workers)
        self._seat_newcomers(joining if staying else [])
        effects.answers.update(self._runs(step, commit, not staying))
        for worker in self.roster.workers:
            del self.waiting[worker]
        self._places.seat(self.roster.replicas)
        self.call, self._leaving, self._finishing = None, False, False
        effects.regrouped = Regrouped(
            roster=self.roster, step=step, outcome=outcome, lost_steps=lost
        )

    def _seat_newcomers(self, newcomers: Sequence[Replica]) -> None:
        """Those without state get it from the others; a source that failed before is passed by."""
        self._newcomers = {replica.formed for replica in newcomers}
        self._behind = {worker: r.formed for r in newcomers for worker in r.workers}
        turn = sum(self._failed_heals.get(formed, 0) for formed in self._newcomers)
        self._heals = plan_heals(self.roster, {r.index for r in newcomers}, turn)
        self._heal_again = False

    def _runs(self, step: int, commit: Commit | None, restore: bool) -> dict[str, Answer]:
        replicas = self.roster.replicas
        lanes = Packed(self.roster.lanes[replica.index] for replica in replicas)
        heals = Packed(self._heals) if self._heals else ()
        return {
            worker: Run(
                generation=self.generation,
                replica=replica.index,
                rank=rank,
                position=position,
                lanes=lanes,
                step=step,
                commit=commit,
                heals=heals,
                restore=restore,
                source="memory" if restore and step > self.restore_step else "store",
                lead=position == 0 and rank == 0,
                recorded=self.recorded,
                meet=self.meet,
                serial=self._settle(worker),
            )
            for position, replica in enumerate(replicas)
            for rank, worker in enumerate(replica.workers)
        }

    def _resolve(self, reports: list[Report]) -> tuple[int, Commit | None, Outcome]:
        """Where everybody goes on.

        A step that one of the living saw committed is applied by all: whoever passed the commit
        knows that every worker holds the complete gradient (design.md, "The step and its commit").
        """
        if not reports:
            step = max(self.restore_step, self.snapshot_step)
            return step, None, "start" if self.call == "start" else "restore"
        furthest = max(reports, key=lambda report: report.step or 0)
        step = furthest.step or 0
        if any(report.step != step for report in reports):
            return step, furthest.last, "finish_step"
        repeat = any(report.in_step for report in reports)
        return step, furthest.last, "repeat" if repeat else "boundary"

    # -- helpers -----------------------------------------------------------------------------------

    def _give_up(self, formation: Replica | None) -> bool:
        """A formation, if any, will not come about: `advance` tells its workers. Returns whether
        there was one."""
        if formation is not None:
            self._broken.append(formation)
        return formation is not None

    def _signal(self, worker: str, kind: SignalKind, effects: Effects) -> None:
        self._serials[worker] = self._serials.get(worker, 0) + 1
        broken = kind == "fault" and self.replica_broken(worker)
        effects.signals[worker] = Signal(serial=self._serials[worker], kind=kind, broken=broken)
        self.called_away.setdefault(worker, self._serials[worker])

    def _settle(self, worker: str) -> int:
        return self._serials.get(worker, 0)
