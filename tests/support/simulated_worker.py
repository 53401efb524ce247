"""A simulated worker: a generator that follows `elastic/worker/worker.py`, `trainer/loop/steps.py`,
`trainer/recovery/heal.py` and `elastic/worker/coordinator_link.py`, and yields what it waits for.

What is known of the network: a collective fails for those who wait in it once a member is gone
(Gloo), or only when a signal calls its worker away, or says that its own replica is broken (NCCL,
or a frozen peer). Those who complete one across replicas get the same values, while it may fail for
others of them. Waiting for a group to gather ends only when all are there, or with a signal.
`simulated_run.py` decides who moves when.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elastic.protocol.messages import (
    Answer,
    Build,
    Identity,
    Leave,
    Report,
    Run,
    Standing,
    Stop,
    shows_recent,
)
from tests.support import simulation_checks as checks
from trainer.replication.step_commit import Commit

if TYPE_CHECKING:
    from tests.support.simulated_run import World

Applied = tuple[tuple[int, int], ...]
"""A worker's state: (step, generation in which it was committed) of each step in it, in order."""
Life = Generator["Wait", Any, Any]


class Lost(Exception):
    """A collective failed or was left."""


def make_commit(step: int, boundary: bool = False, generation: int = 1) -> Commit:
    """The commit of a step of which nothing else matters."""
    return Commit(
        step=step,
        loss=2.0,
        grad_norm=1.0,
        tokens=10,
        digests=b"",
        boundary=boundary,
        generation=generation,
    )


@dataclass
class Channel:
    """A process group."""

    members: tuple[str, ...]
    closed: set[str] = field(default_factory=set)
    """Members that have let go of it."""
    entered: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """Collective -> what each member brought."""
    given_up: bool = False
    """It is of a replica that is not to come about, though all its members live."""


@dataclass
class Wait:
    """What a worker waits for: it goes on once `ready`, with the value of `result`."""

    what: str
    ready: Callable[[], bool]
    result: Callable[[], Any] = lambda: None
    fails: Callable[[], bool] = lambda: False
    """Whether it may fail now, with Lost."""
    crosses: bool = False
    """It is a collective across replicas."""


@dataclass
class Progress:
    """As in `trainer.loop.steps`."""

    step: int
    applied: Applied
    last: Commit | None = None
    in_step: bool = False


class SimWorker:
    """One worker's life."""

    def __init__(self, world: World, name: str, rank: int, node: str) -> None:
        self.world, self.name, self.rank = world, name, rank
        self.identity = Identity(worker=name, rank=rank, node=node, pid=rank)
        self.called = {"fault": 0, "boundary": 0}
        self.heard = self.settled = self.built = 0
        self.answer: Answer | None = None
        self.run: Run | None = None
        self.replica: Channel | None = None
        self.progress: Progress | None = None
        self.position: Progress | None = None
        self.gradient: tuple[int, int] | None = None
        """(step, generation) whose complete gradient it holds."""
        self.finished = self.done = False
        self.source: tuple[int, str] | None = None
        """As a newcomer: (generation, worker) whose state is on its way."""
        self.arrived: Applied | None = None
        """The state, once it is here."""
        self.backlog: list[tuple[int, int]] = []
        """As a newcomer: the gradients of the steps committed meanwhile."""
        self.place = 0
        """Rank in its replica."""
        self.generation = 0
        """Of the roster that it worked in last."""
        self.meet = 0
        """The coordinator at whose store its process groups meet."""
        self.side = 0
        """Formation that it builds its part of beside the steps, as a follower; 0: none."""
        self.side_built = False
        self.replica_aborted = False
        """It was told that its replica is broken, and has aborted the replica's group."""
        self.waits_for_answer = False
        self.place_in_run = Standing(identity=self.identity)
        """As in `CoordinatorLink`."""
        self.heal_failed = self.newcomer = self.joined = False
        self.cross_lost: int | None = None
        """Generation whose group across replicas has failed for it, with nobody calling it: it
        tells each coordinator so until it has its next part."""
        self.writing: tuple[int, int, int, Applied] | None = None
        self.remembering: tuple[int, int, int, Applied] | None = None
        """As `writing`, for a snapshot."""
        self.records: list[tuple[int, int]] = []
        """(step, generation) of the steps it saw committed and has not reported."""
        self.life = self._live()
        self.wait = Wait("birth", lambda: True)

    # -- elastic/worker/worker.py ------------------------------------------------------------------

    def _live(self) -> Life:
        yield self.wait
        while True:
            answer = yield from self._join()
            if isinstance(answer, Stop):
                self._leave_replica()
                self.world.left(self, answer)
                return
            if isinstance(answer, Leave):
                self._leave_replica()
                continue
            try:
                yield from self._build(answer) if isinstance(answer, Build) else self._train(answer)
            except Lost:
                yield Wait("trouble", lambda: self.world.peer_lost(self))
                checks.check_trouble(self.world, self)
                self._leave_replica()

    def report(self) -> Report:
        progress = self.progress
        return Report(
            identity=self.identity,
            built=self.side if self.side_built else self.built,
            rank=self.place,
            generation=self.generation,
            step=None if progress is None else progress.step,
            in_step=self.position is not None and self.position.in_step,
            last=None if progress is None else progress.last,
            finished=self.finished,
        )

    def standing(self) -> Standing:
        """What it tells a new coordinator; an answer of the old one that is on its way counts."""
        standing = self.place_in_run
        if self.waits_for_answer and self.answer is not None:
            standing = standing.after(self.answer)
        settled = getattr(self.answer, "serial", 0) if self.waits_for_answer else 0
        serial = max(settled, self.settled, *self.called.values())
        return replace(standing, serial=serial)

    def _join(self) -> Life:
        self.answer, self.waits_for_answer = None, True
        self.place_in_run = self.place_in_run.joining(self.report())
        self.world.send_join(self)
        answer: Answer = yield Wait("answer", lambda: self.answer is not None, lambda: self.answer)
        self.waits_for_answer = False
        self.place_in_run = self.place_in_run.after(answer)
        self.run = answer if isinstance(answer, Run) else None
        if isinstance(answer, Run):
            self.cross_lost = None
            kept = [] if answer.restore else self.records
            self.records = [record for record in kept if record[0] >= answer.recorded]
        if isinstance(answer, Build | Run):
            self.settled = answer.serial
            self.meet = answer.meet[1]
        return answer

    def _leave_replica(self) -> None:
        self._close_side()
        if self.replica is not None:
            self.replica.closed.add(self.name)
        self.replica = None
        self.built, self.finished, self.replica_aborted = 0, False, False

    def _build(self, answer: Build) -> Life:
        checks.check_build(self.world, self, answer)
        self._leave_replica()
        if not answer.keep:
            self.progress = self.position = self.gradient = None
        self.place = answer.rank
        self.replica = channel = self.world.channels["replica", answer.formed]
        assert channel.members[answer.rank] == self.name
        yield from self._gather(channel)
        yield from self._inside("init", hears=True)
        self.built = answer.formed

    # -- elastic/worker/side_build.py --------------------------------------------------------------

    def _tend_side(self, run: Run) -> None:
        """What is built beside the steps is begun, given up, or taken over."""
        if run.follows and self.replica is not None:
            self._leave_replica()
        if not run.follows and self.side == run.formed:
            assert self.side_built
            self.replica, self.built = self.world.channels["replica", self.side], self.side
            self.side, self.side_built = 0, False
        wanted = 0 if run.build is None else run.build.formed
        if self.side != wanted:
            self._close_side()
        if wanted and not self.side:
            self.side = wanted
            self.world.channels["replica", wanted].entered.setdefault("here", {})[self.name] = True

    def _close_side(self) -> None:
        if self.side:
            self.world.channels["replica", self.side].closed.add(self.name)
        self.side, self.side_built = 0, False

    def builds_beside(self) -> bool:
        """The thread goes on, if it can."""
        channel = self.world.channels["replica", self.side]
        here, there = channel.entered["here"], channel.entered.setdefault("init", {})
        if len(here) < len(channel.members) or self.world.any_gone(channel):
            return False
        if self.name not in there:
            there[self.name] = None
            return True
        self.side_built = len(there) == len(channel.members)
        return self.side_built

    def _train(self, run: Run) -> Life:
        checks.check_run(self, run)
        self._tend_side(run)
        self.generation = run.generation
        cross, progress = Cross(self, run), None
        try:
            if run.restore or run.lacks_state:
                self.progress = None
            yield from cross.join()
            self._catch_up(run)
            if run.restore and not (yield from self._restore(run, cross)):
                return
            self._begin_heal(run, cross)
            progress = self.progress or Progress(run.step, (), last=run.commit)
            self.position = progress
            self.finished = (yield from self._loop(run, cross, progress)) == "finished"
        finally:
            cross.channel.closed.add(self.name)
            self.source = None
            if progress is not None and self.newcomer and self.arrived is not None:
                progress.applied, self.newcomer = (*self.arrived, *self.backlog), False
                assert len(progress.applied) == progress.step, "made up with another step"
            if progress is not None and not self.newcomer:
                self.progress = progress
        if self.finished and self.progress is not None and not run.follows:
            yield self._writer_idle()
            self.flush()

    def _catch_up(self, run: Run) -> None:
        behind = self.progress is not None and self.progress.step == run.step - 1
        if behind and run.commit is not None and not run.restore:
            self._finish_step(run.commit, self.progress)

    def _begin_heal(self, run: Run, cross: Cross) -> None:
        """Sources copy their state at this step; newcomers wait for it without waiting."""
        source = run.source_of(run.position)
        self.joined = run.follows or source is not None
        self.newcomer = run.lacks_state
        self.arrived, self.backlog, self.heal_failed = None, [], False
        if self.newcomer:
            assert self.progress is None and source is not None
            self.source = run.generation, cross.channel.members[source]
        elif any(h.source == run.position and run.rank in h.ranks for h in run.heals):
            assert self.progress is not None and self.progress.step == run.step
            self.world.copies[run.generation, self.name] = self.progress.applied

    def _follow(self, progress: Progress) -> None:
        """A newcomer's part of a step: makes up for the steps that it has kept, some at a time."""
        if self.heal_failed:
            self.heal_failed = False
            self.world.heal_failed(self)
        if self.arrived is None:
            return
        while self.backlog and self.world.rng.random() < 0.7:
            self.arrived += (self.backlog.pop(0),)
        if not self.backlog:
            progress.applied, self.newcomer = self.arrived, False
            assert len(progress.applied) == progress.step, "caught up with another step"
            self.place_in_run = replace(self.place_in_run, behind=False)
            self.world.caught_up(self)

    def _restore(self, run: Run, cross: Cross) -> Life:
        """As `trainer/recovery/shared_restore.py`: those with the same part learn whether it can be
        read, and hand it round; each replica then agrees."""
        if run.step == 0:
            self.progress = Progress(0, ())
            return True
        applied = self.world.read(run)
        unreadable = lost = False
        try:
            read = yield from cross.collective(("read", run.step), applied is not None)
            unreadable = not all(read.values())
            if not unreadable:
                for number in range(self.world.plan.collectives):
                    yield from cross.collective(("handed round", run.step, number))
        except Lost:
            lost = True
        agreed = yield from self._inside(("restored", run.generation), (unreadable, lost))
        if any(given_up for given_up, _ in agreed.values()):
            if applied is None:
                self.world.unreadable(run)
            return False
        if any(gone for _, gone in agreed.values()):
            return False
        assert applied is not None and len(applied) == run.step
        self.progress = Progress(run.step, applied)
        return True

    # -- trainer/loop/steps.py ---------------------------------------------------------------------

    def _loop(self, run: Run, cross: Cross, progress: Progress) -> Life:
        if progress.step == self.world.plan.steps:
            yield from self._save_and_evaluate(run, progress)
        while progress.step < self.world.plan.steps:
            commit = yield from self._try_step(run, cross, progress)
            if commit is None:
                return "fault"
            self._finish_step(commit, progress)
            yield from self._save_and_evaluate(run, progress)
            if commit.boundary:
                return "boundary"
        return "finished"

    def _try_step(self, run: Run, cross: Cross, progress: Progress) -> Life:
        step, failed = progress.step, False
        progress.in_step = True
        if self.newcomer:
            self._follow(progress)
        if run.lanes_of(run.rank)[run.position]:
            yield from self._inside(("lanes", run.generation, step))
        self.gradient = None
        try:
            for number in range(self.world.plan.collectives):
                yield from cross.collective(("reduce", step, number))
            self.gradient = (step, run.generation)
        except Lost:
            failed = True
        total = yield from self._agree(run, cross, step, failed)
        if total[0]:
            progress.in_step = not (failed and run.follows)
            return None
        return make_commit(step, total[1], run.generation)

    def _agree(self, run: Run, cross: Cross, step: int, failed: bool) -> Life:
        mine = (failed, self.called["boundary"] > self.settled)
        if run.follows:
            total = yield from self._sum_over_replicas(run, cross, step, mine)
        else:
            total = yield from self._agree_in_replica(run, cross, step, mine)
        if run.rank == 0 or not run.followers[run.rank]:
            return total
        try:
            told = yield from cross.collective(("told", step), total, root=True)
        except Lost:
            return (True, False) if run.follows else total
        return next(iter(told.values())) if run.follows else total

    def _agree_in_replica(self, run: Run, cross: Cross, step: int, mine: tuple[bool, ...]) -> Life:
        assert self.replica is not None
        leader = self.replica.members[0]
        needs = self.replica.members if self.name == leader else (self.name,)
        votes = yield from self._inside(("votes", run.generation, step), mine, needs)
        total = None
        if self.name == leader:
            total = tuple(map(any, zip(*votes.values(), strict=True)))
            total = yield from self._sum_over_replicas(run, cross, step, total)
        handed = yield from self._inside(
            ("total", run.generation, step), total, (leader, self.name)
        )
        return handed[leader]

    def _sum_over_replicas(self, run: Run, cross: Cross, step: int, mine: tuple[bool, ...]) -> Life:
        if run.rank > 0 or mine[0]:
            return mine
        try:
            totals = yield from cross.collective(("commit", step), mine)
        except Lost:
            return True, mine[1]
        return tuple(map(any, zip(*totals.values(), strict=True)))

    def _finish_step(self, commit: Commit, progress: Progress | None) -> None:
        assert progress is not None and progress.step == commit.step
        assert self.gradient == (commit.step, commit.generation), "applied without its gradient"
        if self.newcomer:
            self.backlog.append(self.gradient)
        else:
            progress.applied += (self.gradient,)
        progress.step, progress.last, progress.in_step = commit.step + 1, commit, False
        self.gradient = None
        assert self.run is not None
        self.records.append((commit.step, self.run.generation))
        self.place_in_run = replace(self.place_in_run, proven=True)

    def _save_and_evaluate(self, run: Run, progress: Progress) -> Life:
        if self.joined:
            return
        step, plan = progress.step, self.world.plan
        last = step == plan.steps
        due = last or (plan.save_every is not None and step % plan.save_every == 0)
        if run.position == 0 and due:
            if last:
                yield self._writer_idle()
            if self.writing is None and step not in self.world.saved:
                self.writing = (step, run.generation, run.rank, progress.applied)
        due = not last and plan.memory_every is not None and step % plan.memory_every == 0
        if run.position == 0 and due and self.remembering is None:
            self.remembering = (step, run.generation, run.rank, progress.applied)
        if last:
            yield from self._inside(("evaluate", run.generation, step))

    # -- waiting -----------------------------------------------------------------------------------

    def leave_now(self) -> bool:
        return self.called["fault"] > self.settled

    def flush(self) -> None:
        """The lead reports the steps."""
        if self.run is not None and self.run.lead:
            self.world.record(self.records)
            self.records = []

    def recent(self) -> list[tuple[int, int]]:
        """The steps that it shows when it joins."""
        return self.records if shows_recent(self.run, self.built) else []

    def _writer_idle(self) -> Wait:
        return Wait("writer", lambda: self.writing is None)

    def _gather(self, channel: Channel) -> Life:
        here = channel.entered.setdefault("here", {})
        here[self.name] = True
        world, incarnation = self.world, self.meet
        # One that has no connection yet to a store that is lost goes on trying.
        notices = world.rng.random() < 0.5
        yield Wait(
            "gather",
            lambda: len(here) == len(channel.members) and world.incarnation == incarnation,
            fails=lambda: self.leave_now() or (notices and world.incarnation != incarnation),
        )

    def _inside(
        self,
        key: Any,
        value: Any = None,
        needs: tuple[str, ...] | None = None,
        *,
        hears: bool = False,
    ) -> Life:
        """A collective of the replica; it completes once `needs` (default: all) have entered. That
        in which its group is made `hears` calls."""
        channel = self.replica
        assert channel is not None
        if len(channel.members) == 1:
            yield Wait("moment", lambda: True)
            return {self.name: value}
        there = channel.entered.setdefault(key, {})
        there[self.name] = value
        needs, wakes = needs or channel.members, not self.world.plan.silent
        return (
            yield Wait(
                str(key),
                lambda: all(name in there for name in needs),
                lambda: there,
                fails=lambda: (
                    self.replica_aborted
                    or (hears and self.leave_now())
                    or (wakes and self.world.any_gone(channel))
                ),
            )
        )


class Cross:
    """As `trainer.replication.replicas.CrossGroup`: one worker's group across replicas in one
    generation."""

    def __init__(self, worker: SimWorker, run: Run) -> None:
        self.worker, self.lost, self.generation = worker, False, run.generation
        self.channel = worker.world.channels["cross", run.generation, run.rank]
        assert self.channel.members[run.position] == worker.name
        assert len(self.channel.members) == len(run.lanes_of(run.rank))

    def join(self) -> Life:
        if len(self.channel.members) == 1:
            return
        world = self.worker.world
        try:
            yield from self.worker._gather(self.channel)
            there = self.channel.entered.setdefault("connect", {})
            there[self.worker.name] = incarnation = self.worker.meet
            yield Wait(
                "connect",
                lambda: len(there) == len(self.channel.members),
                fails=lambda: (
                    self.worker.leave_now()
                    or world.any_gone(self.channel)
                    or world.incarnation != incarnation
                ),
                crosses=True,
            )
        except Lost:
            self._lose()

    def collective(self, key: Any, value: Any = None, *, root: bool = False) -> Life:
        """With `root` a broadcast of the first one's value."""
        worker, channel = self.worker, self.channel
        if len(channel.members) == 1:
            return {worker.name: value}
        if self.lost:
            raise Lost
        there = channel.entered.setdefault(key, {})
        first = channel.members[0]
        if not root or worker.name == first:
            there[worker.name] = value
        needed = 1 if root else len(channel.members)
        wakes = not worker.world.plan.silent
        try:
            return (
                yield Wait(
                    str(key),
                    lambda: len(there) == needed,
                    lambda: there,
                    fails=lambda: worker.leave_now() or (wakes and worker.world.any_gone(channel)),
                    crosses=True,
                )
            )
        except Lost:
            self._lose()
            raise

    def _lose(self) -> None:
        self.lost = True
        if not self.worker.leave_now():
            self.worker.cross_lost = self.generation
            self.worker.world.send_cross_lost(self.worker)
