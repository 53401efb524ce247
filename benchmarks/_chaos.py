"""What the soak decides and judges, without a cluster: schedules drawn from seeds, and restores
that were not needed. Who was lost, and how long a run stood still, is judged in `_chaos_losses.py`
and `_chaos_stalls.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

from elastic import HealthConfig
from elastic.protocol.events import (
    Event,
    RegroupDone,
    ReplicaForming,
    ReplicaHealed,
    StepRecord,
    WorkerLost,
)
from elastic.protocol.faults import Fault, Kind, draw_faults
from trainer.loop.phases import Phase

STEPS, LANES = 40, 4
HEALTH = HealthConfig(
    max_crashes=200, max_hangs=200, max_same_step_errors=50, regroup_timeout_s=60.0
)
"""Many faults in one place end no run here."""
SLOW_HEALTH = replace(HEALTH, regroup_timeout_s=6.0)
"""Of a run whose evaluations are slow."""

ActionKind = Literal[
    "add",
    "remove",
    "drain",
    "coordinator",
    "supervisor",
    "agent",
    "link",
    "mtu",
    "store",
    "machine",
]
ON_NETWORK: tuple[ActionKind, ...] = ("link", "mtu", "store")
"""What fails in a network between machines, for a while."""
LASTS_S: dict[ActionKind, tuple[float, ...]] = {
    "link": (1.0, 4.0, 8.0),
    "mtu": (4.0, 8.0, 40.0),
    "store": (1.0, 4.0, 8.0),
    "machine": (0.0,),
}
"""How long a failure on hosts lasts. The longest costs a worker: two failures, and a test."""
OF_COORDINATOR: tuple[ActionKind, ...] = ("coordinator", "machine")
"""What ends the coordinator's process."""
PROCESSES: tuple[ActionKind, ...] = ("supervisor", "agent")
"""What ends a process that nobody should miss."""
SLOW_EVALUATION_S = 10.0
"""How long a slow evaluation takes; longer than `SLOW_HEALTH` lets a worker ignore a call."""
KINDS: tuple[Kind, ...] = ("kill", "freeze", "raise")
EDGES: tuple[Phase, ...] = ("checkpoint", "evaluation", "shutdown")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Replicas x shard x tensor."""

    replicas: int
    """Replicas of the whole run."""
    shard: int
    """Sharding degree."""
    tensor: int
    """Tensor degree."""

    def __str__(self) -> str:
        return f"{self.replicas}x{self.shard}x{self.tensor}"

    @property
    def workers(self) -> int:
        """Of one replica."""
        return self.shard * self.tensor

    @property
    def slots(self) -> int:
        """Of all replicas."""
        return self.replicas * self.workers


def parse_layout(text: str) -> Layout:
    """Reads `2x1x1`. Raises ValueError for anything else."""
    replicas, shard, tensor = map(int, text.split("x"))
    return Layout(replicas=replicas, shard=shard, tensor=tensor)


LAYOUTS = tuple(map(parse_layout, ("2x1x1", "3x1x1", "2x2x1", "1x2x1", "2x1x2")))


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something that is done to the cluster in the middle of a run."""

    step: int
    """When so many steps are recorded, or earlier where the run waits for machines."""
    kind: ActionKind
    """A machine for one replica comes; it is gone without a word; that it will go is announced. The
    process of the coordinator, the supervisor or a node's agent is killed. On hosts: a host's link
    is down; large packets between two hosts are lost; the store's packets to a host are lost; the
    machine of the control plane and the driver is lost."""
    paused: bool = False
    """Whether the run stands still until the cluster has taken notice."""
    host: int = 0
    """Where a network fails: at this host, or between it and the next."""
    lasts_s: float = 0.0
    """How long a network fails."""

    def __str__(self) -> str:
        where = f" host {self.host} for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind}@{self.step}{where}{' paused' if self.paused else ''}"


@dataclass(frozen=True, kw_only=True)
class Deed:
    """An action as it was carried out. Times are in seconds since the epoch."""

    action: Action
    """What was to be done."""
    began: float
    """When it was begun."""
    ended: float
    """When it was done, and the run, if it was paused, let go on."""
    nodes: tuple[str, ...] = ()
    """The machines that it was done to, as Ray calls them."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One run of the soak."""

    seed: int
    """It is drawn from this."""
    layout: Layout
    """Its sizes."""
    spares: int
    """Workers without a slot."""
    min_replicas: int
    """Fewest replicas to train with."""
    faults: tuple[Fault, ...]
    """Injected by the run into itself."""
    actions: tuple[Action, ...]
    """Done to it from outside, in order."""
    machines: tuple[int, ...] | None
    """CPUs of its machines at the start; None: one that has room for all."""
    save_every: int | None
    """Steps between checkpoints."""
    memory_every: int | None
    """Steps between snapshots."""
    patience_s: float
    """How long a batch waits for the run to be whole; 0: faults hit it as it is."""
    hosts: bool = False
    """Whether each replica has a host of its own, and the control plane one, with a network between
    them."""
    evaluation_s: float = 0.0
    """How long an evaluation takes at least."""

    @property
    def name(self) -> str:
        """Of the run."""
        return f"seed-{self.seed}"

    @property
    def health(self) -> HealthConfig:
        """Timeouts and budgets of the run."""
        return SLOW_HEALTH if self.evaluation_s else HEALTH

    def __str__(self) -> str:
        faults = ",".join(map(str, self.faults)) or "none"
        actions = ",".join(map(str, self.actions))
        slow = f"evaluations {self.evaluation_s:g} s " if self.evaluation_s else ""
        return (
            f"seed {self.seed}: {self.layout} spares {self.spares} min {self.min_replicas} "
            f"saves {self.save_every}/{self.memory_every} patience {self.patience_s:g} s "
            f"{slow}{'on hosts ' if self.hosts else ''}| "
            f"{faults} | {actions or 'no actions'}"
        )


def draw_schedule(seed: int, layouts: Sequence[Layout], *, resize: bool) -> Schedule:
    """The schedule of a seed.

    Args:
        seed: the same seed and the same other arguments draw the same schedule.
        layouts: one of them is taken.
        resize: whether machines may come and go; about half of the runs then have it.
    """
    rng = random.Random(seed)
    layout = rng.choice(list(layouts))
    spares = rng.randint(0, 2)
    faults = _draw_faults(rng, layout)
    resized = resize and layout.replicas > 1 and rng.random() < 0.5
    machines, actions = _draw_resize(rng, layout, spares) if resized else (None, [])
    if rng.random() < 0.3:
        kill = Action(step=_middle(rng), kind="coordinator", paused=rng.random() < 0.5)
        actions.append(kill)
    schedule = Schedule(
        seed=seed,
        layout=layout,
        spares=spares,
        min_replicas=rng.randint(1, layout.replicas - resized),
        faults=faults,
        actions=tuple(actions),
        machines=machines,
        save_every=rng.choice([None, 10]),
        memory_every=rng.choice([None, None, 5]),
        patience_s=rng.choice([0.0, 0.2]),
    )
    return _draw_environment(rng, schedule) if resize else schedule


def _draw_environment(rng: random.Random, schedule: Schedule) -> Schedule:
    """Adds the death of a process that nobody should miss, slow evaluations where machines come,
    and, where none do, a network that fails."""
    actions, hosts, evaluation_s = list(schedule.actions), False, 0.0
    if rng.random() < 0.3:
        actions.append(Action(step=_middle(rng), kind=rng.choice(PROCESSES)))
    if any(action.kind == "add" for action in actions) and rng.random() < 0.4:
        evaluation_s = SLOW_EVALUATION_S
        # In a pause a worker seems stuck, in a run that puts up with that for a short time only.
        actions = [replace(action, paused=False) for action in actions]
    if schedule.machines is None and schedule.layout.replicas > 1 and rng.random() < 0.6:
        hosts = True
        for kind in rng.sample((*ON_NETWORK, "machine"), rng.randint(1, 2)):
            host = rng.randrange(schedule.layout.replicas)
            lasts_s = rng.choice(LASTS_S[kind])
            actions.append(Action(step=_middle(rng), kind=kind, host=host, lasts_s=lasts_s))
    actions.sort(key=lambda action: action.step)
    return replace(schedule, actions=tuple(actions), hosts=hosts, evaluation_s=evaluation_s)


def _draw_faults(rng: random.Random, layout: Layout) -> tuple[Fault, ...]:
    """Those of `draw_faults`, and sometimes one at a spare or outside the steps."""
    faults = list(
        draw_faults(
            rng.randrange(2**31),
            count=rng.randint(1, 4),
            steps=STEPS,
            slots=layout.slots,
            kinds=KINDS,
        )
    )
    if rng.random() < 0.3:
        kind: Kind = rng.choice(["kill", "freeze"])
        faults.append(Fault(kind=kind, step=_middle(rng), spare=True))
    if rng.random() < 0.3:
        edge = rng.choice(EDGES)
        step = STEPS if edge == "shutdown" else _middle(rng)
        workers = (rng.randrange(layout.slots),)
        faults.append(Fault(kind=rng.choice(KINDS), step=step, phase=edge, workers=workers))
    return tuple(sorted(faults, key=lambda fault: fault.step))


def _draw_resize(
    rng: random.Random, layout: Layout, spares: int
) -> tuple[tuple[int, ...], list[Action]]:
    """One machine holds all but one replica, the other one comes, goes, or is replaced."""
    first, second = sorted(rng.sample(range(5, STEPS - 5), 2))
    base = (layout.replicas - 1) * layout.workers + spares
    paused = rng.random() < 0.7
    kinds: dict[str, tuple[bool, list[tuple[int, ActionKind]]]] = {
        "grow": (False, [(first, "add")]),
        "shrink": (True, [(first, "remove"), (second, "add")]),
        "replace": (True, [(first, "drain"), (first, "add"), (second, "remove")]),
    }
    there, actions = kinds[rng.choice(sorted(kinds))]
    machines = (base, layout.workers) if there else (base,)
    return machines, [Action(step=step, kind=kind, paused=paused) for step, kind in actions]


def _middle(rng: random.Random) -> int:
    return rng.randrange(2, STEPS - 2)


# -- judging ---------------------------------------------------------------------------------------


def find_needless_restores(
    happened: Sequence[Event], steps: Sequence[StepRecord], workers: int
) -> list[int]:
    """Generations that went back to a saved state although the living held a whole copy.

    A worker holds its part of the state once a step is committed in a roster in which it has lanes,
    or once its replica has healed: until it is lost, takes a place in a new replica, or a step is
    committed without it. A doubtful one does not count, so whatever is found is a fault of ours.

    Args:
        happened: all events of one start of a run.
        steps: its step records, those of lost steps included.
        workers: of one replica.
    """
    copies = _Copies(steps, workers)
    return [event.generation for event in happened if copies.see(event)]


class _Copies:
    """Who holds what, as events go by."""

    def __init__(self, steps: Sequence[StepRecord], workers: int) -> None:
        self._committed = {step.generation: step.time for step in reversed(steps)}
        self._workers = workers
        self._members: dict[int, list[str]] = {}
        self._rank: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        """Worker -> generation that it was in last."""
        self._due: dict[str, int] = {}
        """Worker -> generation in which a commit makes it a holder."""
        self._holders: set[str] = set()
        self._dropped = False
        """A formation took apart a whole copy, or what would be one if nothing else was left."""

    def see(self, event: Event) -> TypeGuard[RegroupDone]:
        """Takes in an event. Returns whether it is a needless restore."""
        self._prove(event.time)
        match event:
            case ReplicaForming():
                self._dropped |= self._whole(event.time)
                self._members[event.replica] = event.workers
                self._rank.update({worker: i for i, worker in enumerate(event.workers)})
                self._holders -= set(event.workers)
            case ReplicaHealed():
                self._holders |= {w for w in self._members[event.replica] if w in self._rank}
            case WorkerLost():
                self._holders.discard(event.worker)
                self._due.pop(event.worker, None)
                self._rank.pop(event.worker, None)
                self._dropped = False
            case RegroupDone():
                needless = self._dropped or self._whole(event.time)
                self._seat(event)
                return needless and event.outcome == "restore"
        return False

    def _prove(self, now: float) -> None:
        proven = {w for w, g in self._due.items() if self._committed.get(g, now) < now}
        self._holders |= proven
        self._due = {w: g for w, g in self._due.items() if w not in proven}

    def _whole(self, now: float) -> bool:
        newest = max((g for g, time in self._committed.items() if time < now), default=0)
        current = {w for w in self._holders if self._seen.get(w, 0) >= newest}
        return len({self._rank[worker] for worker in current}) == self._workers

    def _seat(self, event: RegroupDone) -> None:
        if event.outcome == "restore":
            self._holders.clear()
        self._dropped, self._due = False, {}
        for formed_as, now in event.renumbered.items():
            self._members[now] = self._members.pop(int(formed_as))
        for index, lanes in event.lanes.items():
            for worker in self._members[int(index)]:
                if worker in self._rank:
                    self._seen[worker] = event.generation
                    if lanes:
                        self._due[worker] = event.generation
