"""Schedules of the soak, drawn from seeds. Pure. What the trainer is asked for beside them is in
`_chaos_features.py`; runs are judged in `_chaos_restores.py`, `_chaos_losses.py` and
`_chaos_stalls.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks._chaos_features import Features, draw_features
from elastic import HealthConfig
from elastic.coordinator.fault_injection import TOGETHER_S
from elastic.protocol.faults import RECOVERY_PHASES, Fault, Kind
from trainer.loop.phases import STEP_PHASES, Phase

STEPS, LANES = 40, 4
ROOM_FOR_ALL = 12
"""CPUs of a machine that has room for every run."""
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
NOTICE_S = 20.0
"""The longest pause for the cluster to take notice of something."""
SLOW_EVALUATION_S = 10.0
"""How long a slow evaluation takes; longer than `SLOW_HEALTH` lets a worker ignore a call."""
KINDS: tuple[Kind, ...] = ("kill", "freeze", "raise")
EDGES: tuple[Phase, ...] = ("checkpoint", "evaluation", "shutdown")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Replicas x shard x tensor x context."""

    replicas: int
    """Replicas of the whole run."""
    shard: int
    """Sharding degree."""
    tensor: int
    """Tensor degree."""
    context: int = 1
    """Context degree."""

    def __str__(self) -> str:
        context = f"x{self.context}" if self.context > 1 else ""
        return f"{self.replicas}x{self.shard}x{self.tensor}{context}"

    @property
    def workers(self) -> int:
        """Of one replica."""
        return self.shard * self.tensor * self.context

    @property
    def slots(self) -> int:
        """Of all replicas."""
        return self.replicas * self.workers


def parse_layout(text: str) -> Layout:
    """Reads `2x1x1`, or `2x1x1x2` with a context degree. Raises ValueError for anything else."""
    replicas, shard, tensor, *context = map(int, text.split("x"))
    (degree,) = context or (1,)
    return Layout(replicas=replicas, shard=shard, tensor=tensor, context=degree)


def parse_layouts(text: str) -> tuple[Layout, ...] | None:
    """Reads several, with commas between them; None: the text is empty."""
    return tuple(map(parse_layout, text.split(","))) if text else None


LAYOUTS = tuple(map(parse_layout, ("2x1x1", "3x1x1", "2x2x1", "1x2x1", "2x1x2")))
WIDTHS = (1, 1, 2, 2, 2, 4)
"""Workers of a replica that is laid out anew, each as often as it is drawn."""
DEGREES = {
    1: ((1, 1, 1),),
    2: ((2, 1, 1), (1, 2, 1), (1, 1, 2)),
    4: ((4, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4)),
}
"""Workers of a replica -> shard, tensor, context, each as often as it is drawn."""


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
    """Where a network fails: at the (first) host of this replica, or between it and the next."""
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
    """Whether each replica has a host of its own, or one for each of its nodes, and the control
    plane one, with a network between them."""
    evaluation_s: float = 0.0
    """How long an evaluation takes at least."""
    features: Features | None = None
    """What the trainer is asked for; None: the smallest model, and nothing."""

    @property
    def nodes(self) -> int:
        """Hosts of each replica, in a run on hosts."""
        here = None if self.features is None else self.features.workers_per_node
        return 1 if here is None else self.layout.workers // here

    @property
    def homes(self) -> tuple[int, ...]:
        """Workers of each host of the replicas, in a run on hosts."""
        return (self.layout.workers // self.nodes,) * (self.layout.replicas * self.nodes)

    @property
    def name(self) -> str:
        """Of the run."""
        return f"seed-{self.seed}"

    @property
    def health(self) -> HealthConfig:
        """Timeouts and budgets of the run. Who waits for the soak does not hang: in a pause, or
        for others who are to be hit at the same time."""
        health, asked = SLOW_HEALTH if self.evaluation_s else HEALTH, self.features
        if asked is not None:
            health = replace(
                health,
                compare_every=asked.compare_every,
                witness_every=asked.witness_every,
                heal_bytes_per_s=asked.heal_bytes_per_s,
            )
        if any(action.paused for action in self.actions):
            return replace(health, progress_timeout_s=2 * NOTICE_S)
        if any(len(fault.workers) > 1 for fault in self.faults):
            return replace(health, progress_timeout_s=2 * TOGETHER_S)
        return health

    def __str__(self) -> str:
        faults = ",".join(map(str, self.faults)) or "none"
        actions = ",".join(map(str, self.actions))
        slow = f"evaluations {self.evaluation_s:g} s " if self.evaluation_s else ""
        return (
            f"seed {self.seed}: {self.layout} spares {self.spares} min {self.min_replicas} "
            f"saves {self.save_every}/{self.memory_every} patience {self.patience_s:g} s "
            f"{slow}{'on hosts ' if self.hosts else ''}| "
            f"{faults} | {actions or 'no actions'} | {self.features or 'plain'}"
        )


def draw_schedule(
    seed: int, layouts: Sequence[Layout] | None = None, *, resize: bool, plain: bool = False
) -> Schedule:
    """The schedule of a seed: faults and actions, then what the trainer is asked for, by random
    numbers of its own. So a seed's faults are the same, plain or not.

    Args:
        seed: the same seed and the same other arguments draw the same schedule.
        layouts: one of them is taken; None: one of LAYOUTS, and, unless plain, its replicas are
            laid out anew.
        resize: whether machines may come and go; about half of the runs then have it.
        plain: nothing is asked of the trainer.
    """
    schedule = _draw_plain(random.Random(seed), seed, layouts or LAYOUTS, resize)
    if plain:
        return schedule
    rng = random.Random(f"features {seed}")
    if layouts is None:
        schedule = _lay_anew(rng, schedule)
    features = draw_features(rng, schedule.layout)
    if schedule.evaluation_s:  # to write a profile takes longer than `SLOW_HEALTH` puts up with
        features = replace(features, profile=None)
    return replace(schedule, features=features)


def _draw_plain(rng: random.Random, seed: int, layouts: Sequence[Layout], resize: bool) -> Schedule:
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


def _lay_anew(rng: random.Random, schedule: Schedule) -> Schedule:
    """The same schedule where a replica has other degrees, and sometimes two or four workers for
    each that it had. A fault then hits one of these."""
    before, spares = schedule.layout, schedule.spares
    widths = [
        width
        for width in WIDTHS
        if width % before.workers == 0 and before.replicas * width + spares <= ROOM_FOR_ALL
    ]
    width = rng.choice(widths)
    shard, tensor, context = rng.choice(DEGREES[width])
    times, machines = width // before.workers, schedule.machines
    if machines is not None:
        machines = ((before.replicas - 1) * width + spares, *(width for _ in machines[1:]))
    return replace(
        schedule,
        layout=Layout(replicas=before.replicas, shard=shard, tensor=tensor, context=context),
        faults=tuple(
            replace(
                fault, workers=tuple(slot * times + rng.randrange(times) for slot in fault.workers)
            )
            for fault in schedule.faults
        ),
        machines=machines,
    )


def _draw_faults(rng: random.Random, layout: Layout) -> tuple[Fault, ...]:
    """Some in the steps, and sometimes one at a spare or outside them."""
    within = random.Random(rng.randrange(2**31))  # stored seeds draw so
    faults = _draw_within(within, rng.randint(1, 4), layout.slots)
    if rng.random() < 0.3:
        kind: Kind = rng.choice(["kill", "freeze"])
        faults.append(Fault(kind=kind, step=_middle(rng), spare=True))
    if rng.random() < 0.3:
        edge = rng.choice(EDGES)
        step = STEPS if edge == "shutdown" else _middle(rng)
        workers = (rng.randrange(layout.slots),)
        faults.append(Fault(kind=rng.choice(KINDS), step=step, phase=edge, workers=workers))
    return tuple(sorted(faults, key=lambda fault: fault.step))


def _draw_within(rng: random.Random, count: int, slots: int) -> list[Fault]:
    """Some faults alone, some on two workers at once, some in a recovery; by their steps."""
    common = sorted(STEP_PHASES)
    faults: list[Fault] = []
    for step in sorted(rng.randrange(STEPS) for _ in range(count)):
        after = faults and rng.random() < 0.3
        phase = rng.choice(sorted(RECOVERY_PHASES) if after else common)
        most = 2 if slots > 1 and rng.random() < 0.3 else 1
        faults.append(
            Fault(
                kind=rng.choice(KINDS),
                step=faults[-1].step if after else step,
                phase=phase,
                workers=tuple(sorted(rng.sample(range(slots), most))),
            )
        )
    return faults


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
