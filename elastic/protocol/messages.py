"""What workers and the coordinator say to each other. Plain frozen data; it crosses Ray."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from elastic.protocol.causes import Cause
from elastic.protocol.events import StepRecord
from elastic.protocol.roster import Heal
from health.reading import Reading
from trainer.loop.samples import Skips
from trainer.replication.step_commit import Commit

Source = Literal["store", "memory"]
SignalKind = Literal["fault", "boundary"]
KeptState = Literal["none", "part", "whole"]
Versions = tuple[tuple[str, str], ...]
"""Name -> version, as pairs: they are compared, and counted."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who a worker is."""

    worker: str
    """Unique in the run; a replacement has a new one."""
    rank: int
    """World rank that Ray gave it: neighbours in rank are neighbours on the network."""
    node: str
    """Ray's id of its node."""
    pid: int
    """Its process on that node."""
    born_ticks: int | None = None
    """When that was started (`health.process`): a later process may have the same id."""
    heartbeat_fd: int | None = None
    """Descriptor of its heartbeat in that process (`health.heartbeat`)."""
    device: str = ""
    """Its GPU, as CUDA names it; empty on a CPU."""
    stacks: tuple[int, int] | None = None
    """Descriptor and thread of `health.stacks.offer_stacks`."""
    recorder: tuple[int, int] | None = None
    """Descriptors by which it tells of its collectives (`health.answers`)."""
    logs: tuple[str, ...] = ()
    """Files on its node that its output goes to."""
    versions: Versions = ()
    """What its bits and connections depend on (`elastic/worker/versions.py`); none of a worker
    whose package is too old to say."""


@dataclass(frozen=True, kw_only=True)
class Helper:
    """A helper of a node (`elastic/node/helpers.py`)."""

    name: str
    """What it is, in words."""
    pid: int
    """Its process on that node."""
    born_ticks: int | None
    """When that was started, as in `Identity`."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was found of a worker that stands still or is lost, or of one that waits for it."""

    stacks: str = ""
    """What its threads were doing."""
    log: str = ""
    """The last lines of its output."""
    collectives: str = ""
    """What its flight recorder says, as JSON; empty where it does not answer."""
    readings: tuple[Reading, ...] = ()
    """What the instruments of its node showed last of it, and of what is not others'."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """A worker's process that ended, or that was killed because it was as good as dead."""

    worker: str
    """Name of the worker."""
    cause: Cause
    """What happened to it."""
    detail: str
    """The evidence in one line."""
    evidence: Evidence | None = None
    """What was found of it, where it was killed for doing nothing."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker has when it joins."""

    identity: Identity
    """Who it is."""
    built: int = 0
    """Number of the formation whose process group and model it holds; 0: none."""
    rank: int = 0
    """Rank, in its replica, of the state that it holds."""
    generation: int = 0
    """Generation of the roster that it worked in last."""
    step: int | None = None
    """Steps in its state; None: it has no state."""
    in_step: bool = False
    """Whether it had begun on step `step`."""
    last: Commit | None = None
    """The commit of step - 1, where it saw it."""
    finished: bool = False
    """It has done everything up to the end of the run."""
    recent: tuple[StepRecord, ...] = ()
    """The latest steps it saw committed, should the lead worker have died before it sent them."""


@dataclass(frozen=True, kw_only=True)
class LinkTest:
    """What a worker has found of its connections to the others of its cross group."""

    generation: int
    """Generation of the roster."""
    short: Mapping[int, int]
    """Position of each whose message did not come in time -> bytes of it that did."""
    of_bytes: int
    """Size of a message."""
    bound_s: float
    """The time that it had."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a worker stands, for a coordinator that was started anew and knows nothing."""

    identity: Identity
    """Who it is."""
    formed: int = 0
    """Number of the formation that it builds or has built its part of; 0: none."""
    built: bool = False
    """It has built it."""
    replica: int = 0
    """Index of that replica."""
    rank: int = 0
    """Its rank in it."""
    generation: int = 0
    """Generation of the roster that the formation was in last; 0: none yet."""
    position: int = 0
    """Position of the replica in that roster."""
    lanes: tuple[int, ...] = ()
    """Lanes of the replica in that roster."""
    replicas: int = 0
    """Replicas in that roster."""
    kept: bool = False
    """The formation is in no roster yet, and goes on with what its workers hold."""
    source: int | None = None
    """Position that it heals from, as a newcomer."""
    proven: bool = False
    """A step was committed in that roster: its process groups work."""
    behind: bool = False
    """It is a newcomer and has not caught up."""
    serial: int = 0
    """The latest signal that it has heard, or that was settled before it could."""

    def joining(self, report: Report) -> Standing:
        """Where the worker stands while it joins."""
        if report.built == self.formed and report.built:
            return replace(self, built=True)
        if not report.built:
            return Standing(identity=self.identity)
        return Standing(  # a follower has built it beside the steps
            identity=self.identity,
            formed=report.built,
            built=True,
            replica=self.replica,
            rank=self.rank,
        )

    def after(self, answer: Answer) -> Standing:
        """Where the worker stands once it has this answer."""
        if isinstance(answer, Build):
            return Standing(
                identity=self.identity,
                formed=answer.formed,
                replica=answer.replica,
                rank=answer.rank,
                kept=answer.kept == "whole",
            )
        if isinstance(answer, Run):
            return replace(
                self,
                formed=answer.formed,
                replica=answer.replica,
                rank=answer.rank,
                generation=answer.generation,
                position=answer.position,
                lanes=answer.lanes_of(answer.rank)[answer.position],
                replicas=len(answer.lanes),
                kept=False,
                source=answer.source_of(answer.position),
                proven=False,
                behind=answer.lacks_state,
            )
        if isinstance(answer, Leave):
            return Standing(identity=self.identity)
        return self


@dataclass(frozen=True, kw_only=True)
class Build:
    """Take this slot in a new replica: make its process group, build the model, join again."""

    formed: int
    """Number of the formation; unique in the run."""
    replica: int
    """Index of the replica."""
    rank: int
    """This worker's rank in it."""
    step: int
    """Steps that the run has committed so far."""
    keep: bool
    """Go on with the state that this worker holds from a broken replica, in the same rank."""
    kept: KeptState
    """What of the replica's state its workers go on with."""
    meet: tuple[str, int]
    """Host and port of the store where process groups meet."""
    serial: int
    """Signals up to this one are settled."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a new roster tells all its workers alike."""

    generation: int
    """Generation of the roster."""
    lanes: tuple[tuple[int, ...], ...]
    """Lanes of each replica, by position."""
    step: int
    """Steps committed: where everybody goes on."""
    commit: Commit | None
    """Commit of step - 1: a worker at step - 1 holds that step's gradient and applies it."""
    heals: tuple[Heal, ...]
    """Replicas that lack state. They have no lanes."""
    followers: tuple[int, ...]
    """Workers of no whole replica, by the rank of their state: they take part in the sums over the
    replicas after those, and hear of the commits."""
    restore: bool
    """No replica has state: everybody reads checkpoint `step`, or starts from the seed at step
    0."""
    source: Source
    """Where `restore` reads: the checkpoint store, or the snapshot in the nodes' memory."""
    recorded: int
    """Steps that the coordinator has records of."""
    until: int
    """Steps at which the run ends: earlier than planned where it was asked to stop."""
    skips: Skips
    """Samples that the run passes over."""
    pause_s: float
    """How long to wait before the groups are made: those before have failed, with nobody lost."""
    meet: tuple[str, int]
    """Host and port of the store where process groups meet."""

    @cached_property
    def packed(self) -> bytes:
        """The order for the wire: made once, and copied into every worker's part of it."""
        order = {field.name: getattr(self, field.name) for field in fields(Order)}
        return pickle.dumps(order, pickle.HIGHEST_PROTOCOL)

    def source_of(self, position: int) -> int | None:
        """Position that a replica heals from; None for one that does not."""
        return next((heal.source for heal in self.heals if heal.position == position), None)

    def lanes_of(self, rank: int) -> list[tuple[int, ...]]:
        """Lanes of all who take part in the sums over the workers of one rank, by position."""
        return [*self.lanes, *[()] * self.followers[rank]]

    def part(
        self,
        *,
        replica: int,
        rank: int,
        position: int,
        formed: int,
        serial: int,
        build: Build | None = None,
    ) -> Run:
        """A worker's part of it."""
        run = Run.__new__(Run)  # there are thousands, and `__init__` sets each field by a call
        run.__dict__.update(
            vars(self),
            packed=self.packed,
            replica=replica,
            rank=rank,
            position=position,
            formed=formed,
            serial=serial,
            build=build,
        )
        return run


@dataclass(frozen=True, kw_only=True)
class Run(Order):
    """A worker's part of a new roster: train."""

    replica: int
    """Index of this worker's replica."""
    rank: int
    """This worker's rank in it."""
    position: int
    """Position of that replica in the roster, or of a follower after them: the rank across
    replicas."""
    formed: int
    """Number of that replica's formation."""
    serial: int
    """Signals up to this one are settled."""
    build: Build | None = None
    """What a follower is to build beside the steps."""

    @property
    def follows(self) -> bool:
        """Whether this worker is in no whole replica."""
        return self.position >= len(self.lanes)

    @property
    def lacks_state(self) -> bool:
        """Whether this worker is to get the state by a heal."""
        return any(h.position == self.position and self.rank in h.ranks for h in self.heals)

    @property
    def lead(self) -> bool:
        """Whether this worker reports the steps."""
        return self.position == self.rank == 0

    @property
    def savers(self) -> int:
        """Replicas that share the writing of saves: the first so many, which all have state."""
        return len(self.lanes) - len(self.heals)

    def __reduce__(self) -> tuple[Callable[..., Run], tuple[Any, ...]]:
        own = self.replica, self.rank, self.position, self.formed, self.serial, self.build
        return _unpack, (self.packed, *own)


def _unpack(
    packed: bytes,
    replica: int,
    rank: int,
    position: int,
    formed: int,
    serial: int,
    build: Build | None,
) -> Run:
    order: dict[str, Any] = pickle.loads(packed)
    return Run(
        **order,
        replica=replica,
        rank=rank,
        position=position,
        formed=formed,
        serial=serial,
        build=build,
    )


def shows_recent(run: Run | None, built: int) -> bool:
    """Whether a worker that joins shows the latest steps that it saw committed. One worker of a
    whole replica does it for all. Had it no time to, and the replica is replaced by one of its
    survivors, they do when they have built that.

    Args:
        run: its part in the roster, where the last answer was one.
        built: see `Report`.
    """
    return run is None or run.rank == 0 or not built


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Let go of your replica, keep the state, and join again: the others of it were told to train,
    as you were, but you did not get that answer, and they wait for you in a collective that only
    this ends."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The run is over."""

    error: str | None
    """Why it failed; None: it is finished."""
    cause: Cause | None = None
    """What came back, whatever was tried against it; None where it was something else."""


Answer = Build | Run | Leave | Stop


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The answer to records."""

    steps: int
    """Steps that are in the run's records now."""
    save_wanted: bool
    """The lead is to have a checkpoint written, unless it does."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A call to a worker, while it works."""

    serial: int
    """Rising number, per worker."""
    kind: SignalKind
    """`fault`: leave now. `boundary`: leave together after a commit."""
    broken: bool = False
    """This worker's own replica has lost a peer."""
