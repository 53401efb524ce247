"""The coordinator's state machine: who is there, who is called, and when the next roster stands.

No Ray, no clock, no file in it: `join` and `lose` take in facts, and `advance` answers with what to
do about them. So every order of arrivals and losses can be played through in a unit test.

    start ──► all formed replicas ready ──► roster
    roster ── a member is lost, or leaves by itself ──► call "fault" ──► all of the whole replicas
              are here ──► roster
    roster ── a formed replica is ready, a newcomer has caught up, a machine is to go ──►
              call "boundary" ──► all are here, after the same commit ──► roster

Workers without a slot wait in the pool, and replicas are formed of them (`formations.py`). Such a
one enters the roster as a newcomer: without lanes, until it has the state of a healthy one
(`heals.py`). How a regroup ends is in `conclusion.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from elastic.membership.calls import Calls
from elastic.membership.conclusion import (
    Resolution,
    decide_step,
    find_staying,
    plan_parts,
)
from elastic.membership.decisions import Effects, GroupConfig, Regrouped
from elastic.membership.formations import Formations
from elastic.membership.heals import Heals
from elastic.membership.places import Places
from elastic.membership.planned import all_copies_go, decide_planned, plan_departures
from elastic.membership.resumption import plan_resumption
from elastic.protocol.messages import (
    Build,
    Identity,
    Leave,
    Order,
    Report,
    SignalKind,
    Standing,
    Stop,
)
from elastic.protocol.roster import Replica, Roster, find_renumbered, next_roster, number_anew
from trainer.parallel.layout import slot_of

Call = Literal["start", "fault", "boundary"]


class Membership:
    """Takes in facts and says what follows. All methods are immediate.

    Args:
        config: sizes.
        generation: the last generation that anything was written under, 0 for a new run.
        restore_step: step of the newest checkpoint, 0 without one; updated by `checkpointed`.
        snapshot_step: step of the newest readable snapshot, 0 without one; see `snapshotted`.
        meet: host and port of the store where process groups meet.
    """

    def __init__(
        self,
        config: GroupConfig,
        *,
        generation: int,
        restore_step: int,
        snapshot_step: int = 0,
        meet: tuple[str, int] = ("", 0),
    ) -> None:
        self.config, self.generation = config, generation
        self.restore_step, self.snapshot_step = restore_step, snapshot_step
        self.recorded = self.reached = max(restore_step, snapshot_step)
        self.began = 0
        """Step that the newest roster began at."""
        self.members: dict[str, Identity] = {}
        self.waiting: dict[str, Report] = {}
        self.roster = Roster(generation=generation, replicas=(), lanes={})
        self.call: Call | None = "start"
        self.stopped: Stop | None = None
        self._meet = meet
        self._unreadable: str | None = None
        self.calls, self.heals = Calls(), Heals()
        self._places = Places(self.waiting.keys())
        self.formations = Formations(config, self._places, self.waiting)
        self._leaving = self._dismissed = False
        self._lost: set[str] = set()
        self._torn: set[str] = set()  # see `Resumption`
        self._away: dict[str, Stop | Leave] = {}  # wait, and are to be sent away
        self._going: set[str] = set()  # are to be sent away once they have no slot

    # -- facts -------------------------------------------------------------------------------------

    def join(self, report: Report) -> None:
        """A worker is here and waits."""
        worker = report.identity.worker
        self.waiting[worker] = report
        self.calls.followed(worker)
        if worker in self._lost:
            self._away[worker] = Stop(error="this worker was written off; it is replaced")
            return
        if worker in self._torn and report.built:
            self._away[worker] = Leave()
            return
        self._torn.discard(worker)
        self.members[worker] = report.identity
        self.reached = max(self.reached, report.step or 0)
        self._places.arrive(worker, report.built)
        if self._places.stands(worker):
            at_work = not report.finished and (report.in_step or self.call is None)
            self._leaving |= at_work or (report.step is None and worker not in self.heals.behind)

    def lose(self, worker: str) -> Identity | None:
        """A worker is gone, for good. Returns who it was, None where it was no member."""
        self.calls.followed(worker)
        self.waiting.pop(worker, None)
        self._away.pop(worker, None)
        self._going.discard(worker)
        if worker not in self._lost:
            self._lost.add(worker)
            self.formations.lose(worker)
        return self.members.pop(worker, None)

    def drain(self, worker: str, *, dismiss: bool = False) -> None:
        """A worker will go, or its machine: it gets no slot any more, and leaves the one it has at
        a step boundary, as soon as enough other replicas are whole and have state.

        Args:
            worker: it.
            dismiss: once it has no slot its process ends; else that waits for what may come.
        """
        self.formations.retire(worker)
        if dismiss:
            self._going.add(worker)

    def record(self, step: int) -> None:
        """`step` is committed and in the records."""
        self.recorded = step + 1
        self.reached = max(self.reached, step + 1)

    def stop(self, error: str) -> None:
        """The run ends with `error`, where it has not ended already."""
        self.stopped = self.stopped or Stop(error=error)

    def caught_up(self, worker: str) -> Replica | None:
        """A newcomer's worker has the state. Returns its replica where it was the last of it."""
        return self._places.of(worker) if self.heals.received(worker) else None

    def checkpointed(self, step: int) -> None:
        """A checkpoint of `step` is committed."""
        self.restore_step = max(self.restore_step, step)

    def checkpoint_lost(self, *, newest: int, reason: str) -> None:
        """The newest checkpoint cannot be read: now it is that of `newest`, 0 without one.

        Args:
            newest: step.
            reason: what ends the run where nothing is left to go on from but the seed.
        """
        self.restore_step, self._unreadable = newest, reason

    def snapshotted(self, step: int) -> None:
        """The newest snapshot that can be read is of `step`; 0: there is none (any more)."""
        self.snapshot_step = step

    def resume(
        self,
        standings: Sequence[Standing],
        *,
        generation: int,
        restored: int,
        formations: int,
        recorded: int,
        began: int,
    ) -> None:
        """Takes up a run whose coordinator was lost, from what its workers know.

        Where they all stand in one whole roster, nothing is called and no step stops. Workers that
        wait join once more after this.

        Args:
            standings: of all living workers.
            generation: of the newest roster in the records, 0 where none stood yet.
            restored: generation of the newest that began from a saved state or from the seed.
            formations: replicas that ever began to form.
            recorded: steps that the run's records hold.
            began: step that the newest roster in the records began at.
        """
        self.members = {s.identity.worker: s.identity for s in standings}
        self.calls.resume(standings)
        self.recorded, self.reached = recorded, max(recorded, self.reached)
        self.began = began
        found = plan_resumption(
            standings,
            workers_per_replica=self.config.workers_per_replica,
            max_replicas=self.config.max_replicas,
        )
        started = generation > 0 or found.roster.generation > 0
        self.generation = max(self.generation, generation, found.roster.generation)
        self.roster = found.roster
        self._places.form((*found.standing, *found.forming))
        self._places.seat(found.standing)
        self.formations.resume(formations, found.broken, kept=found.kept, since=restored)
        self.heals.resume(found.heals, found.behind, found.doubtful)
        self._torn = set(found.torn)
        self.call = None if started else "start"
        self._leaving = started and not found.consistent

    # -- questions ---------------------------------------------------------------------------------

    def slot_name(self, worker: str) -> str | None:
        """The slot of a worker in words; None for a worker without one."""
        replica = self.roster.replica_of(worker)
        if replica is None:
            return None
        return str(slot_of(replica.index, replica.workers.index(worker), self.config.tensor))

    def replica_broken(self, worker: str) -> bool:
        """Whether the replica that `worker` works in, standing or forming, is no more."""
        return self.stopped is not None or self._places.of(worker) is None

    def formation_of(self, worker: str) -> int | None:
        """Number of the replica, standing or forming, that `worker` works in."""
        replica = self._places.of(worker)
        return None if replica is None else replica.formed

    def awaits(self, step: int, generation: int) -> bool:
        """Whether a record of `step`, done in `generation`, is one that is missing.

        All of an older generation were shown when their workers joined for this one, but for those
        of workers who were in no roster since, and whose state the others went on with later.
        """
        if generation == self.generation:
            return step >= self.recorded
        return step == self.recorded < self.began and generation >= self.formations.since

    def ahead(self, step: int, generation: int) -> bool:
        """Whether a save of `step`, by workers of `generation`, holds steps that are in no record
        and never will be: they were lost before they told of them, and the run went on without."""
        return generation < self.generation and step > self.recorded

    @property
    def spares(self) -> list[str]:
        """Workers that wait without a slot."""
        return sorted(self._places.idle)

    def source_of(self, worker: str) -> int | None:
        """Number of the replica that a newcomer's worker heals from."""
        replica = self._places.of(worker)
        numbers = [other.index for other in self.roster.replicas]
        if replica is None or replica.index not in numbers:
            return None
        source = self.heals.source_of(numbers.index(replica.index))
        return None if source is None else numbers[source]

    @property
    def settled(self) -> bool:
        """Whether everybody with a slot has state, and nobody is called away."""
        return self.call is None and not self.heals.behind

    @property
    def last_copies_go(self) -> bool:
        """Whether each replica that has state is on a machine that will go."""
        return all_copies_go(self._places, self.heals)

    @property
    def whole_replicas(self) -> int:
        """Replicas that train, or would if there were enough of them."""
        return self._places.whole

    @property
    def standing(self) -> tuple[Replica, ...]:
        """Replicas of the roster that are whole, in order of position."""
        return tuple(self._places.standing.values())

    @property
    def forming(self) -> tuple[Replica, ...]:
        """Replicas that form, the oldest first."""
        return tuple(self._places.forming.values())

    # -- decisions ---------------------------------------------------------------------------------

    def advance(self) -> Effects:
        """Everything that follows from the facts so far."""
        effects = Effects()
        if self.stopped is None and self._all_finished():
            self.stopped = Stop(error=None)
        if self.stopped is None:
            self._decide(effects)
        if self.stopped is not None:
            effects.answers.update(dict.fromkeys(self.waiting, self.stopped))
            self._dismiss(effects)
            self.waiting.clear()
        return effects

    def _decide(self, effects: Effects) -> None:
        self._send_away(effects)
        self._free_survivors(effects)
        self._call(effects)
        if self._reassemble(effects):
            self._build(self.formations.from_pool(), effects)
            self._conclude(effects)
            if effects.regrouped is not None:  # one that has left made room
                self._build(self.formations.from_pool(), effects)
        self._release(effects)

    def _all_finished(self) -> bool:
        """Everybody with a slot is done, and the last state is in a committed checkpoint."""
        places = self._places
        return (
            self.restore_step >= self.config.steps
            and bool(places.standing)
            and not places.absent
            and all(self.waiting[w].finished for r in places.standing.values() for w in r.workers)
        )

    @property
    def _some_finished(self) -> bool:
        """Whether somebody with a slot is done: the others are about to be."""
        return any(r.finished and self._places.stands(w) for w, r in self.waiting.items())

    def _dismiss(self, effects: Effects) -> None:
        """The run is over: those at work may wait for one that is gone."""
        if not self._dismissed:
            self._signal(self.members, "fault", effects)
        self._dismissed = True

    def _send_away(self, effects: Effects) -> None:
        """A worker that was written off but lives (or whose join outlived it) must leave; one that
        others wait for in its replica lets go of it."""
        effects.answers.update(self._away)
        for worker in self._away:
            del self.waiting[worker]
        self._away.clear()

    def _release(self, effects: Effects) -> None:
        """Those that were told to go and have no slot (any more) end."""
        for worker in [w for w in self._going if w in self.waiting and not self._places.of(w)]:
            effects.answers[worker] = Stop(error=None)
            del self.waiting[worker], self.members[worker]

    def _free_survivors(self, effects: Effects) -> None:
        """Calls those who build for a replica that will not come about."""
        for replica in self.formations.take_broken():
            self._signal(replica.workers, "fault", effects)

    def _reassemble(self, effects: Effects) -> bool:
        """Where no replica with state is left, has one made of the survivors. Returns whether that
        is decided."""
        if self.call != "fault" or self._has_source:
            return True
        replicas = self.formations.from_survivors(self.members)
        self._build(replicas or (), effects, keep=True)
        self._free_survivors(effects)  # of those that were given up for it
        return replicas is not None

    @property
    def _has_source(self) -> bool:
        """Whether a replica stands that is known to have its state."""
        return any(formed not in self.heals.newcomers for formed in self._places.standing)

    def _build(self, replicas: Sequence[Replica], effects: Effects, *, keep: bool = False) -> None:
        effects.formed.extend(replicas)
        for replica in replicas:
            for rank, worker in enumerate(replica.workers):
                effects.answers[worker] = Build(
                    formed=replica.formed,
                    replica=replica.index,
                    rank=rank,
                    step=self.reached,
                    keep=keep,
                    meet=self._meet,
                    serial=self.calls.settled(worker),
                )
                del self.waiting[worker]

    def _call(self, effects: Effects) -> None:
        broken = len(self._places.standing) < len(self.roster.replicas)
        if self.call in (None, "boundary") and (broken or self._leaving):
            effects.called = "fault"
            self._signal_roster("fault", effects)
        elif self.call is None and not self._some_finished:
            least = self.config.min_replicas
            effects.called = decide_planned(self._places, self.heals, least)
            if effects.called is not None:
                self._signal_roster("boundary", effects)

    def _signal_roster(self, kind: SignalKind, effects: Effects) -> None:
        """Calls all who have a slot, survivors of broken replicas too: they may wait for others."""
        self.call = kind
        self._signal(self.roster.workers, kind, effects)

    def _conclude(self, effects: Effects) -> None:
        places = self._places
        if self.call is None or places.absent:
            return
        whole = self.whole_replicas
        missing = whole - places.unready < self.config.min_replicas
        if missing or self.formations.keeping or (not places.standing and places.unready):
            here = len(places.idle) + whole * self.config.workers_per_replica
            needed = self.config.min_replicas * self.config.workers_per_replica
            effects.short_of = 0 if self.formations.begun == 0 else max(0, needed - here)
            return
        leaving = plan_departures(places, self.heals, self.config.min_replicas)
        draining = {replica.formed for replica in leaving}
        present = [*places.standing.values(), *places.ready]
        able = [replica for replica in present if replica.formed not in draining]
        if draining and not self._find_staying(present, able)[0]:
            able = present  # those that stay have no state after all
        others = {r.index for r in places.forming.values()} - {r.index for r in able}
        self._regroup(present, number_anew(able, others, self.config.max_replicas), effects)

    def _regroup(self, present: list[Replica], able: list[Replica], effects: Effects) -> None:
        """Of the replicas that are here the `able` ones make the next roster; one that leaves may
        have seen a commit that they have not."""
        staying, holders = self._find_staying(present, able)
        stays = {replica.formed for replica in staying}
        joining = [replica for replica in able if replica.formed not in stays]
        resolution = decide_step(
            holders,
            stored=max(self.restore_step, self.snapshot_step),
            first=self.call == "start",
        )
        step, outcome = resolution.step, resolution.outcome
        if step == 0 and outcome == "restore" and self._unreadable is not None:
            self.stop(self._unreadable)  # never silently from the seed
            return
        lost = max(0, self.reached - step) if outcome == "restore" else 0
        if not staying:
            self.recorded = self.reached = step
            self.formations.since = self.generation + 1
        self.generation += 1
        self.began = step
        self.roster = next_roster(
            generation=self.generation,
            staying=staying,
            joining=joining,
            total_lanes=self.config.lanes,
            before=self.roster if self.call == "fault" and staying else None,
        )
        self.heals.begin(self.roster, joining if staying else [])
        order = self._order(resolution, restore=not staying)
        effects.answers.update(plan_parts(order, self.roster, self.calls.settled))
        self._seat()
        effects.regrouped = Regrouped(
            roster=self.roster,
            step=step,
            outcome=outcome,
            lost_steps=lost,
            renumbered=find_renumbered(present, self.roster.replicas),
        )

    def _find_staying(
        self, present: Sequence[Replica], able: Sequence[Replica]
    ) -> tuple[list[Replica], list[Report]]:
        reports = (self.waiting[worker] for replica in present for worker in replica.workers)
        return find_staying(reports, able, since=self.formations.since, recorded=self.recorded)

    def _order(self, resolution: Resolution, *, restore: bool) -> Order:
        step, roster = resolution.step, self.roster
        return Order(
            generation=self.generation,
            lanes=tuple(roster.lanes[replica.index] for replica in roster.replicas),
            step=step,
            commit=resolution.commit,
            heals=self.heals.pairs,
            restore=restore,
            source="memory" if restore and step > self.restore_step else "store",
            recorded=self.recorded,
            meet=self._meet,
        )

    def _seat(self) -> None:
        """All of the new roster leave to train."""
        workers = self.roster.workers
        for worker in workers:
            del self.waiting[worker]
        self._places.seat(self.roster.replicas)
        self.call, self._leaving = None, False

    def _signal(self, workers: Iterable[str], kind: SignalKind, effects: Effects) -> None:
        """Calls those of `workers` that are at work."""
        for worker in workers:
            if worker in self.members and worker not in self.waiting:
                broken = kind == "fault" and self.replica_broken(worker)
                effects.signals[worker] = self.calls.sign(worker, kind, broken=broken)
