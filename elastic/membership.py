"""The coordinator's state machine: who is there, who is called, and when the next roster stands.

No Ray, no clock, no file in it: `join` and `lose` take in facts, and `advance` answers with what to
do about them. So every order of arrivals and losses can be played through in a unit test.

    start ──► all formed replicas ready ──► roster
    roster ── a member is lost, or leaves by itself ──► call "fault" ──► all of the whole replicas
              are here ──► roster
    roster ── a formed replica is ready ──► call "boundary" ──► all are here, after the same commit
              ──► roster

Workers without a slot (spares, survivors of a broken replica, replacements) wait in the pool;
whenever the pool holds enough for a missing replica, one is formed while the others train.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elastic.messages import Answer, Build, Identity, Report, Run, Signal, SignalKind, Stop
from elastic.roster import Replica, Roster, next_roster, plan_formations, plan_heals
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
    called: Call | None = None
    """A regroup was called just now."""
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
        self.forming: list[Replica] = []
        self.call: Call | None = "start"
        self.stopped: Stop | None = None
        self._formations = 0
        self._serials: dict[str, int] = {}
        self._lost: set[str] = set()
        self.called_away: set[str] = set()
        """Workers that were signalled and have not joined since."""

    # -- facts -------------------------------------------------------------------------------------

    def join(self, report: Report) -> None:
        """A worker is here and waits."""
        worker = report.identity.worker
        self.waiting[worker] = report
        self.called_away.discard(worker)
        if worker not in self._lost:
            self.members[worker] = report.identity
            self.reached = max(self.reached, report.step or 0)

    def lose(self, worker: str) -> Identity | None:
        """A worker is gone, for good. Returns who it was, None where it was no member."""
        self._lost.add(worker)
        self.called_away.discard(worker)
        self.waiting.pop(worker, None)
        return self.members.pop(worker, None)

    def checkpointed(self, step: int) -> None:
        """A checkpoint of `step` is committed."""
        self.restore_step = max(self.restore_step, step)

    def snapshotted(self, step: int) -> None:
        """The newest snapshot that can be read is of `step`; 0: there is none (any more)."""
        self.snapshot_step = step

    def slot_name(self, worker: str) -> str | None:
        """The slot of a worker in words; None for a worker without one."""
        replica = self.roster.replica_of(worker)
        if replica is None:
            return None
        return str(slot_of(replica.index, replica.workers.index(worker), self.config.tensor))

    def replica_broken(self, worker: str) -> bool:
        """Whether the replica that `worker` works in, standing or forming, is no more."""
        whole = (*self._standing(), *self.forming)
        return self.stopped is not None or not any(worker in r.workers for r in whole)

    @property
    def whole_replicas(self) -> int:
        """Replicas that train, or would if there were enough of them."""
        return len(self._standing()) + len(self.forming)

    # -- decisions ---------------------------------------------------------------------------------

    def advance(self) -> Effects:
        """Everything that follows from the facts so far."""
        effects = Effects()
        if self.stopped is None and self._all_finished():
            self.stopped = Stop(error=None)
        if self.stopped is not None:
            effects.answers = dict.fromkeys(self.waiting, self.stopped)
            for worker in self.members.keys() - self.waiting.keys():
                self._signal(worker, "fault", effects)  # it may wait for one that is gone
            self.waiting.clear()
            return effects
        self._turn_away(effects)
        self._drop_broken_formations(effects)
        self._call(effects)
        self._form(effects)
        self._conclude(effects)
        return effects

    def _all_finished(self) -> bool:
        """Everybody with a slot is done, and the last state is in a committed checkpoint."""
        reports = [self.waiting.get(w) for replica in self._standing() for w in replica.workers]
        return (
            bool(reports)
            and all(report is not None and report.finished for report in reports)
            and self.restore_step >= self.config.steps
        )

    def _turn_away(self, effects: Effects) -> None:
        """A worker that was written off but lives (or whose join outlived it) must leave."""
        for worker in self.waiting.keys() & self._lost:
            effects.answers[worker] = Stop(error="this worker was written off; it is replaced")
            del self.waiting[worker]

    def _drop_broken_formations(self, effects: Effects) -> None:
        broken = [r for r in self.forming if not r.whole(self.members.keys())]
        for replica in broken:
            self.forming.remove(replica)
            for worker in replica.workers:
                if worker in self.members and worker not in self.waiting:
                    self._signal(worker, "fault", effects)

    def _form(self, effects: Effects) -> None:
        pool = sorted(self._pool(), key=lambda worker: self.members[worker].rank)
        if self._formations == 0 and len(pool) < self.config.start_workers:
            return
        replicas = plan_formations(
            pool=pool,
            taken={r.index for r in (*self._standing(), *self.forming)},
            max_replicas=self.config.max_replicas,
            workers_per_replica=self.config.workers_per_replica,
            next_number=self._formations + 1,
        )
        self._formations += len(replicas)
        self.forming.extend(replicas)
        effects.formed.extend(replicas)
        for replica in replicas:
            for rank, worker in enumerate(replica.workers):
                effects.answers[worker] = Build(
                    formed=replica.formed,
                    replica=replica.index,
                    rank=rank,
                    serial=self._settle(worker),
                )
                del self.waiting[worker]

    def _call(self, effects: Effects) -> None:
        standing = self._standing()
        here = [self.waiting[w] for r in standing for w in r.workers if self._arrived(w)]
        broken = len(standing) < len(self.roster.replicas)
        unhealed = any(report.step is None for report in here)
        left = any(not r.finished and (r.in_step or self.call is None) for r in here)
        finishing = any(report.finished for report in here)
        if self.call in (None, "boundary") and (broken or left or unhealed):
            self._signal_roster("fault", effects)
        elif self.call is None and self._ready() and not finishing:
            self._signal_roster("boundary", effects)

    def _signal_roster(self, kind: SignalKind, effects: Effects) -> None:
        """Calls all who have a slot, survivors of broken replicas too: they may wait for others."""
        self.call = effects.called = kind
        for worker in self.roster.workers:
            if worker in self.members and not self._arrived(worker):
                self._signal(worker, kind, effects)

    def _conclude(self, effects: Effects) -> None:
        standing, ready = self._standing(), self._ready()
        if self.call is None or not all(self._arrived(w) for r in standing for w in r.workers):
            return
        unready = len(self.forming) - len(ready)
        if len(standing) + len(ready) < self.config.min_replicas or (not standing and unready):
            here = len(self._pool()) + sum(len(r.workers) for r in (*standing, *self.forming))
            needed = self.config.min_replicas * self.config.workers_per_replica
            effects.short_of = 0 if self._formations == 0 else max(0, needed - here)
            return
        self._regroup(standing, ready, effects)

    def _regroup(self, standing: list[Replica], ready: list[Replica], effects: Effects) -> None:
        staying = [r for r in standing if all(self.waiting[w].step is not None for w in r.workers)]
        joining = [r for r in (*standing, *ready) if r not in staying]
        step, commit, outcome = self._resolve([self.waiting[w] for r in staying for w in r.workers])
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
        effects.answers.update(self._runs(step, commit, {r.index for r in joining}, not staying))
        for worker in self.roster.workers:
            del self.waiting[worker]
        self.forming = [replica for replica in self.forming if replica not in ready]
        self.call = None
        effects.regrouped = Regrouped(
            roster=self.roster, step=step, outcome=outcome, lost_steps=lost
        )

    def _runs(
        self, step: int, commit: Commit | None, joining: set[int], restore: bool
    ) -> dict[str, Answer]:
        replicas = self.roster.replicas
        heals = () if restore else plan_heals(self.roster, joining)
        return {
            worker: Run(
                generation=self.generation,
                replica=replica.index,
                rank=rank,
                position=position,
                lanes=tuple(self.roster.lanes[other.index] for other in replicas),
                step=step,
                commit=commit,
                heals=heals,
                restore=restore,
                source="memory" if restore and step > self.restore_step else "store",
                lead=position == 0 and rank == 0,
                recorded=self.recorded,
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

    def _arrived(self, worker: str) -> bool:
        return worker in self.waiting

    def _standing(self) -> list[Replica]:
        """Replicas of the roster that are still whole."""
        return [r for r in self.roster.replicas if r.whole(self.members.keys())]

    def _pool(self) -> list[str]:
        """Workers that wait and have no slot: spares, survivors, replacements."""
        placed = {w for r in (*self._standing(), *self.forming) for w in r.workers}
        return [worker for worker in self.waiting if worker not in placed]

    def _ready(self) -> list[Replica]:
        """Formed replicas all of whose workers have built their part and wait."""
        return [
            replica
            for replica in self.forming
            if all(
                worker in self.waiting and self.waiting[worker].built == replica.formed
                for worker in replica.workers
            )
        ]

    def _signal(self, worker: str, kind: SignalKind, effects: Effects) -> None:
        self._serials[worker] = self._serials.get(worker, 0) + 1
        effects.signals[worker] = Signal(serial=self._serials[worker], kind=kind)
        self.called_away.add(worker)

    def _settle(self, worker: str) -> int:
        return self._serials.get(worker, 0)
