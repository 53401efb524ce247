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
(`heals.py`). What is left of a broken one follows the others without a slot, and builds its
successor meanwhile (`repairs.py`). How a regroup ends is in `conclusion.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Literal

from elastic.membership.calls import Calls
from elastic.membership.conclusion import (
    Resolution,
    decide_step,
    find_staying,
    plan_parts,
)
from elastic.membership.decisions import Effects, GroupConfig, Regrouped
from elastic.membership.failure import decide_in_vain, plan_pause_s
from elastic.membership.formations import Formations
from elastic.membership.heals import Heals
from elastic.membership.places import Places
from elastic.membership.planned import all_copies_go, decide_planned, plan_departures
from elastic.membership.progress import Progress
from elastic.membership.resumption import plan_resumption
from elastic.protocol.causes import Cause
from elastic.protocol.messages import (
    Build,
    Identity,
    KeptState,
    Leave,
    Order,
    Report,
    SignalKind,
    Standing,
    Stop,
)
from elastic.protocol.roster import Replica, Roster, find_renumbered, next_roster, number_anew
from trainer.loop.samples import Skips
from trainer.parallel.layout import Slot
from trainer.replication.step_commit import Saving

Call = Literal["start", "fault", "boundary", "end"]


class Membership:
    """Takes in facts and says what follows. All methods are immediate.

    Args:
        config: sizes.
        progress: how far the run is; told of records, checkpoints and snapshots by who has them.
        meet: host and port of the store where process groups meet.
    """

    def __init__(
        self, config: GroupConfig, progress: Progress, meet: tuple[str, int] = ("", 0)
    ) -> None:
        self.config, self.progress = config, progress
        self.members: dict[str, Identity] = {}
        self.waiting: dict[str, Report] = {}
        self.roster = Roster(generation=progress.generation, replicas=(), lanes={})
        self.call: Call | None = "start"
        self.stopped: Stop | None = None
        self.winding_down = False
        """The run is to end with the next roster, which saves."""
        self.until = config.steps
        """Steps at which it ends."""
        self.skips: Skips = ()
        """Samples that it passes over."""
        self.calls, self.heals = Calls(), Heals()
        self.places = Places(self.waiting.keys(), self.members, config.dims.tensor)
        self.formations = Formations(config, progress, self.places, self.waiting, self.members)
        self._meet = meet
        self.lost: set[str] = set()
        """Workers that were written off."""
        self._torn: set[str] = set()
        """See `Resumption`."""
        self._told = 0
        """Generation of the newest roster that was told from here: not before a restart."""
        self._dismissed: set[str] = set()
        """Are to end once they have no slot."""
        self._refused: dict[str, Stop | Leave] = {}
        """Have joined where nothing can come of it, and are told so by the next decision."""
        self._broke_off = False
        """A worker with a slot has left its step with nobody calling it, or is about to."""
        self._cross_failure: str | None = None
        """Why a group across replicas of the roster has failed, where a worker has told."""
        self.links_tested: str | None = None
        """Which connections between the workers of the roster have failed, in words, where they
        have tried them; "" where all are good."""

    # -- facts -------------------------------------------------------------------------------------

    def join(self, report: Report) -> None:
        """A worker is here and waits."""
        worker = report.identity.worker
        self.calls.followed(worker)
        if self._missed(report):
            self._broke_off = True
            if report.built and self.places.stands(worker) and self.config.workers_per_replica > 1:
                self.formations.tear(worker)
                self._torn.add(worker)
        refusal = self._refuse(report)
        if refusal is not None:
            self._refused[worker] = refusal
            return
        self._torn.discard(worker)
        self.waiting[worker] = report
        self.members[worker] = report.identity
        self.progress.saw(report.step)
        self.formations.comes(worker, report.built)
        self.places.arrive(worker, report.built)
        if self.places.stands(worker) or worker in self.roster.followers:
            at_work = not report.finished and (report.in_step or self.call is None)
            self._broke_off |= at_work or (report.step is None and not self.heals.lacks(worker))

    def _missed(self, report: Report) -> bool:
        """Whether a worker that joins never got its part in the roster, which it was answered with:
        the others wait for it in there, those of its replica in collectives that only its leaving
        the replica ends."""
        worker, generation = report.identity.worker, self.roster.generation
        told = self._told == generation and worker not in self.waiting
        part = self.places.stands(worker) or worker in self.roster.followers
        return told and part and report.generation < generation

    def _refuse(self, report: Report) -> Stop | Leave | None:
        """What a worker is told that cannot wait here: one that was written off but lives, or whose
        join outlived it; and one that others wait for in a replica that is no more."""
        worker = report.identity.worker
        if worker in self.lost:
            return Stop(error="this worker was written off; it is replaced")
        if worker in self._torn and report.built:
            return Leave()
        return None

    def lose(self, worker: str) -> Identity | None:
        """A worker is gone, for good. Returns who it was, None where it was no member."""
        self.calls.forget(worker)
        self.waiting.pop(worker, None)
        self._refused.pop(worker, None)
        self._dismissed.discard(worker)
        if worker not in self.lost:
            self.lost.add(worker)
            self._broke_off |= worker in self.roster.followers
            self.formations.lose(worker)
            self.progress.lost()
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
            self._dismissed.add(worker)

    def wind_down(self) -> None:
        """The run is to end after the step that is under way, and to be saved there."""
        self.winding_down = True

    def stop(self, error: str, cause: Cause | None = None) -> None:
        """The run ends with `error`, where it has not ended already; see `Stop` for `cause`."""
        self.stopped = self.stopped or Stop(error=error, cause=cause)

    def cross_lost(self, generation: int, reason: str) -> bool:
        """A group across replicas has failed for a worker of the roster `generation`. It may wait
        inside its replica for one that waits for another replica: only a call ends that. Returns
        whether it is the first such news of that roster."""
        if generation != self.roster.generation or self._cross_failure is not None:
            return False
        self._broke_off, self._cross_failure = True, reason
        return True

    def go_back(self, step: int, skips: Skips = ()) -> None:
        """The state that all hold is not what it should be: the next roster goes on from the
        checkpoint of `step`, or from the seed, and passes over `skips` as well."""
        self.progress.void(step)
        self.skips = (*self.skips, *skips)
        self._broke_off = True

    def caught_up(self, worker: str) -> Replica | None:
        """A newcomer's worker has the state. Returns its replica where it was the last of it."""
        return self.places.of(worker) if self.heals.received(worker) else None

    def built(self, worker: str, formed: int) -> None:
        """A follower has built its part of a formation beside the steps."""
        self.places.built(worker, formed)

    def resume(
        self,
        standings: Sequence[Standing],
        *,
        generation: int,
        restored: int,
        formations: int,
        recorded: int,
        began: int,
        until: int | None = None,
        lost: Set[str] = frozenset(),
    ) -> None:
        """Takes up a run whose coordinator was lost, from what its workers know.

        Where they all stand in one whole roster, nothing is called and no step stops. Workers that
        wait join once more after this.

        Args:
            standings: of all living workers.
            generation: of the newest roster in the records, 0 where none stood yet.
            restored: generation of the newest that began from a saved state or from the seed.
            formations: replicas that ever began to form, by the records.
            recorded: steps that the run's records hold.
            began: step that the newest roster in the records began at.
            until: steps at which it ends as it was asked to, if its workers know that already.
            lost: workers that were written off, by the records. One that lives is no member.
        """
        self.lost.update(lost)
        self.until = self.config.steps if until is None else until
        self.members.update({s.identity.worker: s.identity for s in standings})
        self.calls.resume(standings)
        found = plan_resumption(
            standings,
            workers_per_replica=self.config.workers_per_replica,
            max_replicas=self.config.max_replicas,
        )
        started = generation > 0 or found.roster.generation > 0
        self.progress.resume(
            generation=max(generation, found.roster.generation),
            restored=restored,
            recorded=recorded,
            began=began,
        )
        self.roster = found.roster
        self.places.form((*found.standing, *found.forming))
        self.places.seat(found.standing)
        begun = max([formations, *(standing.formed for standing in standings)])
        placed = [standing.identity.worker for standing in standings if standing.formed]
        self.formations.resume(begun, found.broken, kept=found.kept, placed=placed)
        self.heals.resume(found.heals, found.roster, found.behind, found.doubtful)
        self._torn = set(found.torn)
        self.call = None if started else "start"
        self._broke_off = started and not found.consistent

    # -- questions ---------------------------------------------------------------------------------

    def slot_name(self, worker: str) -> str | None:
        """The slot of a worker in words, of one that follows with its remnant the one that it had;
        None for a worker without one."""
        if (replica := self.roster.replica_of(worker)) is not None:
            index, rank = replica.index, replica.workers.index(worker)
        elif (remnant := self.roster.followers.get(worker)) is not None:
            index = remnant.index
            rank = next(rank for rank, each in remnant.workers.items() if each == worker)
        else:
            return None
        return str(Slot(replica=index, rank=rank, dims=self.config.dims))

    def replica_broken(self, worker: str, formed: int | None = None) -> bool:
        """Whether the replica that `worker` works in, standing or forming, is no more; where it is
        given, whether it is another one than `formed`."""
        now = self.places.formation_of(worker)
        return self.stopped is not None or now is None or formed not in (None, now)

    def needs(self, worker: str) -> bool:
        """Whether something is lost with a living worker: its place; or the step of the others,
        where it is to go, and has not left them yet; or its state, which may be the only copy of
        its rank while it is not decided whether the survivors of broken replicas make one."""
        places, report = self.places, self.waiting.get(worker)
        if places.of(worker) is not None or worker in places.survivors:
            return True
        if report is not None and self._seeks_copy:
            return report.step is not None
        at_work = report is None or self.call == "boundary"
        return at_work and worker in (*self.roster.workers, *self.roster.followers)

    @property
    def settled(self) -> bool:
        """Whether everybody with a slot has state, and nobody is called away."""
        return self.call is None and not self.heals.behind

    @property
    def last_copies_go(self) -> bool:
        """Whether each replica that has state is on a machine that will go."""
        return all_copies_go(self.places, self.heals)

    # -- decisions ---------------------------------------------------------------------------------

    def advance(self) -> Effects:
        """Everything that follows from the facts so far."""
        effects = Effects(answers=dict(self._refused))
        self._refused.clear()
        if self.stopped is None and self._all_finished():
            self.stopped = Stop(error=None)
        if self.stopped is None:
            self._decide(effects)
        if self.stopped is not None:
            self._end(self.stopped, effects)
        return effects

    def _end(self, stop: Stop, effects: Effects) -> None:
        """The run is over: those at work are called, once, for they may wait for one that is
        gone."""
        if self.call != "end":
            self.call = "end"
            self._signal(self.members, "fault", effects)
        effects.answers.update(dict.fromkeys([*effects.answers, *self.waiting], stop))
        self.waiting.clear()

    def _decide(self, effects: Effects) -> None:
        self._call(effects)
        self._free_survivors(effects)
        if self._reassemble(effects):
            self._build(self.formations.from_pool(), effects)
            self._conclude(effects)
            self._free_survivors(effects)  # of those that were given up in it
            if effects.regrouped is not None:  # one that has left made room
                self._build(self.formations.from_pool(), effects)
        effects.refused = self.formations.take_refused()
        self._release(effects)

    def _all_finished(self) -> bool:
        """Everybody with a slot is done, and the last state is in a committed checkpoint."""
        places = self.places
        return (
            self.progress.restore_step >= self.until
            and bool(places.standing)
            and not places.absent
            and all(self.waiting[w].finished for r in places.standing.values() for w in r.workers)
        )

    @property
    def _some_finished(self) -> bool:
        """Whether somebody with a slot has done all steps: the others are about to have."""
        return any(
            report.finished and report.step == self.until and self.places.stands(worker)
            for worker, report in self.waiting.items()
        )

    def _release(self, effects: Effects) -> None:
        """Those that were told to go and have no slot (any more) end; nobody while it is not
        decided whether the survivors make a copy: see `needs`."""
        if self._seeks_copy:
            return
        for worker in [w for w in self._dismissed if w in self.waiting and not self.places.of(w)]:
            effects.answers[worker] = Stop(error=None)
            del self.waiting[worker], self.members[worker]

    def _free_survivors(self, effects: Effects) -> None:
        """Calls those who build for a replica that will not come about, and those of one that has
        broken after a call: they may wait in it for the one that is lost. Not those who only build
        for it beside the steps."""
        beside = self.places.survivors & self.roster.followers.keys()
        passed_by = {*effects.signals, *effects.answers, *beside}
        for replica in self.formations.take_broken():
            self._signal((w for w in replica.workers if w not in passed_by), "fault", effects)

    def _reassemble(self, effects: Effects) -> bool:
        """Where no replica with state is left, has one made of the survivors. Returns whether that
        is decided."""
        if not self._seeks_copy:
            return True
        replicas = self.formations.from_survivors(self.members)
        self._build(replicas or (), effects, keep=True)
        self._free_survivors(effects)  # of those that were given up for it
        return replicas is not None

    @property
    def _seeks_copy(self) -> bool:
        """Whether a fault has left no replica that is known to have its state, and it is not
        decided whether the survivors make one."""
        if self.call != "fault" or self.formations.reassembled:
            return False
        return all(formed in self.heals.behind for formed in self.places.standing)

    def _build(self, replicas: Sequence[Replica], effects: Effects, *, keep: bool = False) -> None:
        """Has the workers of new replicas build their parts. With `keep`, one that has the state of
        its rank goes on with that."""
        effects.formed.extend(replicas)
        for replica in replicas:
            for worker, build in self._parts_of(replica, keep=keep).items():
                effects.answers[worker] = build
                del self.waiting[worker]

    def _repair(self, effects: Effects) -> dict[str, Build]:
        """Has what is left of replicas made whole. Returns what its workers are to build while they
        follow; the others are told now."""
        new = self.formations.repair()
        effects.formed.extend(new)
        beside = dict[str, Build]()
        for replica in self.places.repairs:
            for worker, build in self._parts_of(replica, keep=True).items():
                if worker in self.places.survivors:
                    beside[worker] = build
                elif replica in new:
                    effects.answers[worker] = build
                    del self.waiting[worker]
        return beside

    def _parts_of(self, replica: Replica, *, keep: bool) -> dict[str, Build]:
        keeping = {w for w in enumerate(replica.workers) if keep and self._holds(*w)}
        kept: KeptState = "whole" if len(keeping) == len(replica.workers) else "part"
        return {
            worker: Build(
                formed=replica.formed,
                replica=replica.index,
                rank=rank,
                step=self.progress.reached,
                keep=(rank, worker) in keeping,
                kept=kept if keeping else "none",
                meet=self._meet,
                serial=self.calls.settled(worker),
            )
            for rank, worker in enumerate(replica.workers)
        }

    def _holds(self, rank: int, worker: str) -> bool:
        """Whether a worker has the state of a rank, if it waits; which may be an old one."""
        report = self.waiting.get(worker)
        return report is not None and report.step is not None and report.rank == rank

    def _call(self, effects: Effects) -> None:
        broken = len(self.places.standing) < len(self.roster.replicas)
        if self.call in (None, "boundary") and (broken or self._broke_off):
            effects.called = "fault"
            self._signal_roster("fault", effects)
        elif self.call is None and not self._some_finished:
            least, most = self.config.min_replicas, self.config.max_replicas
            if self.winding_down:
                effects.called = "stop" if self.until == self.config.steps else None
            else:
                effects.called = decide_planned(
                    self.places,
                    self.heals,
                    least,
                    most,
                    follower_goes=not self.places.retired.isdisjoint(self.roster.followers),
                    mendable=self.formations.mendable,
                    uneven=self.roster.uneven,
                )
            if effects.called is not None:
                self._signal_roster("boundary", effects)

    def _signal_roster(self, kind: SignalKind, effects: Effects) -> None:
        """Calls all who have a slot or follow, survivors of broken replicas too: they may wait for
        others."""
        self.call = kind
        self._signal((*self.roster.workers, *self.roster.followers), kind, effects)

    def _conclude(self, effects: Effects) -> None:
        places = self.places
        if self.call is None or places.absent:
            return
        if self.winding_down:
            self._conclude_the_run(effects)
            return
        whole = places.whole
        missing = whole - places.unready < self.config.min_replicas
        if missing or self.formations.keeping or (not places.standing and places.unready):
            if missing:
                self._build(self.formations.repair_here(), effects, keep=True)
            if not self.formations.awaits_start:
                here = self.formations.usable + whole * self.config.workers_per_replica
                needed = self.config.min_replicas * self.config.workers_per_replica
                effects.short_of = max(0, needed - here)
            return
        least, most = self.config.min_replicas, self.config.max_replicas
        leaving = plan_departures(places, self.heals, least, most)
        draining = {replica.formed for replica in leaving}
        present = [*places.standing.values(), *places.ready]
        able = [replica for replica in present if replica.formed not in draining]
        if draining and not self._find_staying(present, able)[0]:
            able = present  # those that stay have no state after all
        self._regroup(present, able, effects)

    def _conclude_the_run(self, effects: Effects) -> None:
        """Whoever has state makes the last roster, which saves; where nobody has, nothing is lost
        by ending at once."""
        if self.formations.keeping:
            return
        self.formations.keep_remnants(set())
        present = [*self.places.standing.values(), *self.places.ready]
        staying, _ = self._find_staying(present, present)
        if staying:
            self._regroup(present, staying, effects)
        else:
            self.stopped = Stop(error=None)

    def _regroup(self, present: list[Replica], able: list[Replica], effects: Effects) -> None:
        """Of the replicas that are `present` the `able` ones make the next roster; one that leaves
        may have seen a commit that they have not. What is left of others follows."""
        progress, places = self.progress, self.places
        staying, holders = self._find_staying(present, able)
        having = {report.identity.worker for report in holders}
        entering = {worker for replica in able for worker in replica.workers}
        self.formations.keep_remnants(having, entering=entering)
        beside = self._repair(effects)
        others = places.taken - {replica.index for replica in present}
        numbered = number_anew(able, others, self.config.max_replicas)
        stays = {replica.formed for replica in staying}
        staying = [replica for replica in numbered if replica.formed in stays]
        joining = [replica for replica in numbered if replica.formed not in stays]
        resolution = decide_step(
            holders,
            stored=progress.stored,
            first=self.call == "start",
        )
        step, outcome = resolution.step, resolution.outcome
        from_seed = step == 0 and outcome in ("start", "restore")
        if from_seed and progress.unreadable is not None:
            self.stop(progress.unreadable)  # never silently from the seed
            return
        if self.call == "fault":
            progress.interrupted(step)
            most, reason = self.config.max_regroups_without_progress, self._cross_failure
            error = decide_in_vain(progress.in_vain, step, most, reason, self.links_tested)
            if error is not None:
                self.stop(error)
                return
        lost = max(0, progress.reached - step) if outcome == "restore" else 0
        progress.begin(step, back=not staying)
        if self.winding_down:
            self.until = step
        self.roster = next_roster(
            generation=progress.generation,
            staying=staying,
            joining=joining,
            remnants=tuple(places.remnants.values()),
            total_lanes=self.config.lanes,
            before=self.roster if self.call == "fault" and staying else None,
        )
        self.heals.begin(self.roster, joining if staying else [], having)
        order = self._order(resolution, restore=not staying)
        effects.answers.update(plan_parts(order, self.roster, self.calls.settled, beside))
        self._seat()
        effects.regrouped = Regrouped(
            roster=self.roster,
            step=step,
            outcome=outcome,
            saving=Saving() if resolution.commit is None else resolution.commit.saving,
            lost_steps=lost,
            renumbered=find_renumbered(present, self.roster.replicas),
        )

    def _find_staying(
        self, present: Sequence[Replica], able: Sequence[Replica]
    ) -> tuple[list[Replica], list[Report]]:
        workers = dict.fromkeys(worker for replica in present for worker in replica.workers)
        reports = [self.waiting[worker] for worker in (*workers, *self.places.survivors)]
        progress = self.progress
        return find_staying(reports, able, since=progress.since, recorded=progress.recorded)

    def _order(self, resolution: Resolution, *, restore: bool) -> Order:
        step, roster, progress = resolution.step, self.roster, self.progress
        return Order(
            generation=progress.generation,
            lanes=tuple(roster.lanes[replica.index] for replica in roster.replicas),
            step=step,
            commit=resolution.commit,
            heals=self.heals.plan,
            followers=tuple(
                len(roster.followers_of(rank)) for rank in range(self.config.workers_per_replica)
            ),
            restore=restore,
            source="memory" if restore and step > progress.restore_step else "store",
            recorded=progress.recorded,
            until=self.until,
            skips=self.skips,
            pause_s=plan_pause_s(progress.in_vain) if self.call == "fault" else 0.0,
            meet=self._meet,
        )

    def _seat(self) -> None:
        """All of the new roster leave to train."""
        for worker in (*self.roster.workers, *self.roster.followers):
            del self.waiting[worker]
        self.places.seat(self.roster.replicas)
        self._told = self.roster.generation
        self.call, self._broke_off = None, False
        self._cross_failure = self.links_tested = None

    def _signal(self, workers: Iterable[str], kind: SignalKind, effects: Effects) -> None:
        """Calls those of `workers` that are at work."""
        for worker in workers:
            if worker in self.members and worker not in self.waiting:
                broken = kind == "fault" and self.replica_broken(worker)
                effects.signals[worker] = self.calls.sign(worker, kind, broken=broken)
