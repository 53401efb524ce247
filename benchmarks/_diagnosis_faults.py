"""What a run sees of each process-level fault, made by the functions that its coordinator and its
node agents decide with: `decide_frozen`, `find_standstill`, `find_stuck`, `decide_lost_nodes`,
`plan_removals`, and `find_slow` with what follows it. Each fault goes the way that finds it in a
run with default settings.

What these are fed is made here, without processes: the states of processes, the places of workers,
leases, tests of connections, paces. `benchmarks.detection` injects the same faults for real, one
worker each; here are all of them at all places.

Four machines with a replica of two workers each; where a fault shows inside replicas, each of these
is on two machines.

The phase of the victim matters where that says so: whether others wait for it in the reduction and
see its connections close (in backward and in the reduction itself), and whether it is told from
those that wait (not in the reduction). How many of all cases differ by more than names and numbers
is counted (`kinds`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Literal

from elastic.config import HealthConfig
from elastic.coordinator.slow_watch import event_of
from elastic.membership.links import between_two, between_workers, describe, plan_removals
from elastic.protocol import causes, events
from elastic.protocol.roster import Replica, Roster
from health.frozen import Sample, decide_frozen, observe
from health.heartbeat import Record
from health.laggards import find_stuck
from health.lease import decide_lost_nodes
from health.pace import Pace
from health.progress import SOON, Place, Standstill, bound_s, find_standstill
from health.signatures import find_sign
from health.stragglers import ROUNDS, count_rounds, find_blame, find_slow
from health.verdict import Sign
from trainer.backend.link_exchange import LINK_BYTES

NODES = ("n0", "n1", "n2", "n3")
WORKERS = tuple(f"w{rank}" for rank in range(8))
NODE_OF = {worker: NODES[rank // 2] for rank, worker in enumerate(WORKERS)}
NAMES = {node: f"i-0{index:016x}" for index, node in enumerate(NODES)}
"""Node -> its instance id."""

FAULTS = (
    "sigkill", "sigstop", "lock_held", "exception", "user_loop", "peer_loop", "network_cut",
    "mtu_black_hole", "raylet_killed", "agent_killed", "slow_worker", "hung_mount",
)  # fmt: skip
PHASES = {
    "forward": "forward",
    "backward": "backward",
    "collective": "reduce",
    "optimizer": "optimizer",
}
"""As the benchmark names them -> as the trainer does."""
RANKS = {"first": 0, "middle": 3, "last": 7}

TIME = 1_000.0
"""Of the fault, in seconds since the epoch."""
_STEPS_S = (1.0, 1.1, 0.9, 1.0)
_HEALTH = HealthConfig()

Replicas = Sequence[tuple[str, str]]
_PACKED: Replicas = tuple((WORKERS[2 * i], WORKERS[2 * i + 1]) for i in range(4))
"""Each on one machine."""
_SPREAD: Replicas = tuple((WORKERS[i], WORKERS[i + 4]) for i in range(4))
"""Each on two."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The truth of a case."""

    cause: str | None
    """Cause of the verdict; None: nothing is to be done."""
    workers: frozenset[str] = frozenset()
    """Those at fault."""
    nodes: frozenset[str] = frozenset()
    """Machines at fault."""
    remedy: str | None = None
    """The step that is due; None: any."""
    spared: frozenset[str] = frozenset(WORKERS)
    """Workers that must not be acted upon."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault as its run has recorded it."""

    name: str
    """Unique."""
    events: Sequence[events.Event]
    """All of the run."""
    expected: Expected
    """What should come of it."""
    origin: Literal["generated", "recorded", "invented"]
    """Of its evidence: made by the functions of a run, taken from a named source, made up by us."""


def fault_cases() -> list[Case]:
    """All faults at all places."""
    return [_case(fault, phase, place) for fault in FAULTS for phase in PHASES for place in RANKS]


def _case(fault: str, phase: str, place: str) -> Case:
    name = f"{fault}.{phase}.{place}"
    scene = Scene(victim=WORKERS[RANKS[place]], phase=PHASES[phase])
    expected = _ACTS[fault](scene)
    happened = run_events(scene.happened, scene.replicas)
    return Case(name=name, events=happened, expected=expected, origin="generated")


def kinds(cases: Iterable[Case]) -> int:
    """How many of some cases differ by more than the names of workers, machines and phases, and by
    more than numbers."""
    return len({_NAMES_AND_NUMBERS.sub("#", repr(case.events)) for case in cases})


_NAMES_AND_NUMBERS = re.compile(rf"\b(?:[wn]\d|{'|'.join(PHASES.values())})\b|\d[\d.,]*")


def run_events(
    happened: Iterable[events.Event], replicas: Replicas = _PACKED
) -> list[events.Event]:
    """The events of a run in which something happened."""
    found: list[events.Event] = [
        events.WorkerJoined(time=1.0, worker=worker, node=NODE_OF[worker], pid=rank, born_ticks=1)
        for rank, worker in enumerate(WORKERS)
    ]
    found += [
        events.ReplicaForming(time=2.0, formed=i + 1, replica=i, workers=list(replica))
        for i, replica in enumerate(replicas)
    ]
    return [*found, *sorted(happened, key=lambda event: event.time)]


def lost(
    worker: str,
    cause: causes.Cause,
    detail: str,
    time: float = TIME,
    replicas: Replicas = _PACKED,
) -> events.WorkerLost:
    """The loss of a worker, as the coordinator records it."""
    (index,) = (i for i, replica in enumerate(replicas) if worker in replica)
    return events.WorkerLost(
        time=time,
        worker=worker,
        node=NODE_OF[worker],
        pid=WORKERS.index(worker),
        slot=f"replica {index} shard {replicas[index].index(worker)} tensor 0",
        cause=cause,
        detail=detail,
    )


def shown(node: str, signs: Iterable[Sign], time: float) -> events.SignsChanged:
    """What a node shows, as the coordinator records it."""
    return events.SignsChanged(
        time=time, node=node, names=[NAMES[node]], signs=[sign.to_json() for sign in signs]
    )


@dataclass
class Scene:
    """Who is hit, where, and what comes of it."""

    victim: str
    phase: str
    replicas: Replicas = _PACKED
    happened: list[events.Event] = field(default_factory=list)

    @property
    def node(self) -> str:
        """The victim's machine."""
        return NODE_OF[self.victim]

    @property
    def mates(self) -> tuple[str, ...]:
        """The workers of its machine."""
        return tuple(worker for worker in WORKERS if NODE_OF[worker] == self.node)

    @property
    def is_awaited(self) -> bool:
        """Whether other replicas are in the reduction meanwhile."""
        return self.phase in ("backward", "reduce")

    def lose(self, worker: str, cause: causes.Cause, detail: str) -> None:
        """A worker is lost. Who waits for it in a collective sees first that a connection closes;
        that of a machine that is cut off does not."""
        self.happened.append(lost(worker, cause, detail, replicas=self.replicas))
        if self.is_awaited and cause not in (causes.NODE, causes.LINK):
            self.break_off("[gloo] Connection closed by peer [10.0.0.3]:71")

    def break_off(self, reason: str) -> None:
        """A collective across replicas has failed."""
        index, other = next((i, r[0]) for i, r in enumerate(self.replicas) if self.victim not in r)
        self.happened.append(
            events.CrossGroupLost(
                time=TIME - 0.5,
                generation=3,
                slot=f"replica {index} shard 0 tensor 0",
                reason=reason,
                worker=other,
                node=NODE_OF[other],
            )
        )


def _only(scene: Scene, cause: causes.Cause) -> Expected:
    worker = frozenset({scene.victim})
    return Expected(cause=cause, workers=worker, spared=frozenset(WORKERS) - worker)


def _machine(scene: Scene, cause: causes.Cause) -> Expected:
    workers = frozenset(scene.mates)
    return Expected(
        cause=cause,
        workers=workers,
        nodes=frozenset({scene.node}),
        spared=frozenset(WORKERS) - workers,
    )


def _sigkill(scene: Scene) -> Expected:
    scene.lose(scene.victim, causes.CRASH, "process 4711 ended")
    return _only(scene, causes.CRASH)


def _freeze(scene: Scene, state: str, seconds: float) -> Expected:
    """Samples of the victim's process, as its node's agent takes them."""
    history = None
    for index in range(round(seconds / 0.2) + 1):
        record = Record(
            serial=9, step=7, phase=1, phase_s=0.0, beat_s=1.0, collectives=4, thread=1, left=0
        )
        history = observe(history, Sample(awake_s=0.2 * index, state=state, record=record))
    assert history is not None
    verdict = decide_frozen(scene.victim, history, _HEALTH.freeze_timeout_s)
    if verdict is not None:
        detail = f"process 4711 is frozen: {verdict.evidence[0]}; it was in {scene.phase}"
        scene.lose(scene.victim, causes.Cause(verdict.cause), detail)
    return _only(scene, causes.HANG)


_ERRORS = ("ValueError: labels out of range", "KeyError: 'tokens'", "RuntimeError: bad batch")


def _exception(scene: Scene) -> Expected:
    error = _ERRORS[WORKERS.index(scene.victim) % len(_ERRORS)]
    detail = f'Traceback (most recent call last):\n  File "task.py", line 7, in loss\n{error}'
    scene.lose(scene.victim, causes.USER_ERROR, detail)
    return _only(scene, causes.USER_ERROR)


def _find_standstill(places: Callable[[float], Sequence[Mapping[str, Place]]]) -> Standstill:
    """What the coordinator finds where nothing moves, after two looks. Whoever has moved between
    them is not accused.

    Args:
        places: where all are when they have been there for so many seconds.
    """
    least_s = _HEALTH.progress_timeout_s
    assert least_s is not None
    soon, now = (
        find_standstill(
            places(share * bound_s(least_s, _STEPS_S) + 0.1),
            least_s,
            _STEPS_S,
            share=share,
            shared_s=_HEALTH.regroup_timeout_s,
        )
        for share in (SOON, 1.0)
    )
    marks = {suspect.worker: suspect.mark for suspect in soon.suspects}
    accused = (one for one in now.suspects if marks.get(one.worker) == one.mark)
    return replace(now, suspects=tuple(accused))


def _stand_still(scene: Scene, mates_phase: str) -> bool:
    """The victim stays in its phase. Its mates have begun one collective more, and wait there; the
    other replicas wait in the reduction. Where it is in that itself, all wait for each other, and
    are called. Returns whether it was found."""

    def places(still_s: float) -> list[dict[str, Place]]:
        return [
            {worker: _place(worker, scene, still_s, mates_phase) for worker in replica}
            for replica in scene.replicas
        ]

    found = _find_standstill(places)
    if found.all_wait:
        scene.break_off("no step for 4.1 s, and all wait for each other")
    for suspect in found.suspects:
        detail = f"it keeps the others: {suspect.evidence} (health.progress_timeout_s)"
        scene.lose(suspect.worker, causes.HANG, detail)
    return bool(found.suspects)


def _place(worker: str, scene: Scene, still_s: float, mates_phase: str) -> Place:
    with_it = any(worker in replica and scene.victim in replica for replica in scene.replicas)
    waits = not with_it or scene.phase == "reduce"
    phase = "reduce" if waits else scene.phase if worker == scene.victim else mates_phase
    return Place(
        mark=70,
        phase=f"{phase} of step 9",
        in_phase_s=still_s + (0.0 if worker == scene.victim else 0.2),
        bound="pace",
        waits=waits,
        collectives=12 if worker == scene.victim else 13,
        longest_s=0.4,
    )


def _does_not_come(scene: Scene) -> None:
    """All were called, and the victim stays where it is."""
    bound = _HEALTH.regroup_timeout_s
    place = replace(_place(scene.victim, scene, bound + 1, "reduce"), waits=True)
    stuck, _ = find_stuck({scene.victim: place}, bound)
    for worker in stuck:
        detail = f"did not regroup in {bound:g} s (health.regroup_timeout_s): in reduce of step 9"
        scene.lose(worker, causes.HANG, detail)


def _loop(scene: Scene, mates_phase: str) -> Expected:
    if not _stand_still(scene, mates_phase):
        _does_not_come(scene)
    return _only(scene, causes.HANG)


def _lock_held(scene: Scene) -> Expected:
    """It stands still, and is found as one that does; in the reduction its heart has stopped before
    it is missed elsewhere."""
    if not _stand_still(scene, scene.phase):
        _freeze(scene, "R", _HEALTH.freeze_timeout_s + 0.4)
    return _only(scene, causes.HANG)


def _user_loop(scene: Scene) -> Expected:
    return _loop(scene, scene.phase)


def _peer_loop(scene: Scene) -> Expected:
    """The same, with mates that are phases ahead and seem as busy."""
    return _loop(scene, "backward")


def _hung_mount(scene: Scene) -> Expected:
    """The kernel says so, sooner or later."""
    expected = _loop(scene, scene.phase)
    if scene.phase != "optimizer":
        line = "nfs: server 10.0.3.7 not responding, still trying"
        sign = find_sign(line, "kernel", scene.node, TIME + 20, {})
        scene.happened.append(shown(scene.node, [sign] if sign else [], TIME + 20))
    return expected


def _network_cut(scene: Scene) -> Expected:
    renewed_s = {node: 99.5 if node != scene.node else 94.0 for node in NODES}
    for _, age_s in decide_lost_nodes(renewed_s, 100.0, _HEALTH.node_timeout_s).items():
        for worker in scene.mates:
            scene.lose(worker, causes.NODE, f"its node was not heard for {age_s:.1f} s")
    return _machine(scene, causes.NODE)


def _raylet_killed(scene: Scene) -> Expected:
    """A container that runs out of memory ends so: its machine may be sound."""
    for worker in scene.mates:
        scene.lose(worker, causes.RAY_NODE, "its node agent is gone: so is its raylet")
    return replace(_machine(scene, causes.RAY_NODE), nodes=frozenset(), remedy="new_process")


def _agent_killed(scene: Scene) -> Expected:
    scene.happened.append(events.AgentEnded(time=TIME, node=scene.node, detail="ActorDiedError"))
    return Expected(cause=None)


_STILL_BOUND_S = 1.5
"""As `LinkTests` has it."""


def _mtu_black_hole(scene: Scene) -> Expected:
    """No large message passes over the victim's machine: in forward and backward the replicas with
    a worker there stand still, else all do, in the reduction. The agents of the nodes try the
    connections."""
    inside = scene.phase in ("forward", "backward")
    if inside:
        scene.replicas = _SPREAD

    def places(still_s: float) -> list[dict[str, Place]]:
        return [
            {w: _waiting(scene, still_s, inside and _touches(replica, scene)) for w in replica}
            for replica in scene.replicas
        ]

    found = _find_standstill(places)
    accused = {suspect.worker for suspect in found.suspects}
    if not (found.all_wait or accused):
        return _machine(scene, causes.LINK)
    short = {pair: 1448 for pair in permutations(NODES, 2) if scene.node in pair}
    failed = between_workers(short, NODE_OF, LINK_BYTES, _STILL_BOUND_S)
    replicas = tuple(
        Replica(index=i, formed=i + 1, workers=r) for i, r in enumerate(scene.replicas)
    )
    roster = Roster(generation=4, replicas=replicas, lanes={i: (i,) for i in range(4)})
    removed = plan_removals(failed, roster, NODE_OF, idle=(), least=1, lost_anyway=accused)
    either = between_two(removed, failed, NODE_OF)
    scene.happened.append(
        events.LinksTested(
            time=TIME, generation=4, count=len(failed), failed=[], removed=sorted(removed)
        )
    )
    for worker in sorted(removed):
        detail = f"connections fail: {describe(failed, NODE_OF)}"
        scene.lose(worker, causes.PATH if worker in either else causes.LINK, detail)
    return _machine(scene, causes.LINK)


def _touches(replica: Iterable[str], scene: Scene) -> bool:
    return any(NODE_OF[worker] == scene.node for worker in replica)


def _waiting(scene: Scene, still_s: float, inside: bool) -> Place:
    """In a collective: one of its replica's, or across."""
    return Place(
        mark=70,
        phase=f"{scene.phase if inside else 'reduce'} of step 9",
        in_phase_s=still_s,
        bound="pace",
        waits=not inside,
        collectives=13,
        longest_s=0.4,
    )


def _slow_worker(scene: Scene) -> Expected:
    """It takes three times as long for its part of the work: for the phase that it is slow in. On
    GPUs its mates wait for it inside their own, where that does not show: they are slow alike,
    which is what `collective` stands for."""
    alike = scene.phase == "reduce"
    slow_ones = scene.mates if alike else (scene.victim,)
    factors = {"optimizer": (1.0, 3.0)}.get(scene.phase, (3.0, 1.0))
    rounds: dict[str, int] = {}
    for number in range(ROUNDS):
        paces = {w: _pace(number, factors if w in slow_ones else (1.0, 1.0)) for w in WORKERS}
        slow = find_slow(paces)
        rounds = count_rounds(rounds, slow)
    stragglers = [worker for worker, count in rounds.items() if count >= ROUNDS]
    for blame in find_blame(stragglers, slow, scene.replicas, 1, NODE_OF):
        scene.happened.append(event_of(blame, slow, rounds, 9, TIME))
    workers = frozenset(slow_ones)
    return Expected(
        cause=causes.SLOW,
        workers=workers,
        nodes=frozenset({scene.node}),
        remedy="other_seat",
        spared=frozenset(WORKERS) - workers,
    )


def _pace(number: int, factors: tuple[float, float]) -> Pace:
    compute, optimizer = factors
    return Pace(
        number=number,
        step_s=1.5,
        micro_batches=2.0,
        tokens=4096.0,
        data_s=0.001,
        read_s=0.05,
        compute_s=0.2 * compute,
        optimizer_s=0.3 * optimizer,
    )


_ACTS: dict[str, Callable[[Scene], Expected]] = {
    "sigkill": _sigkill,
    "sigstop": lambda scene: _freeze(scene, "T", 0.4),
    "lock_held": _lock_held,
    "exception": _exception,
    "user_loop": _user_loop,
    "peer_loop": _peer_loop,
    "network_cut": _network_cut,
    "mtu_black_hole": _mtu_black_hole,
    "raylet_killed": _raylet_killed,
    "agent_killed": _agent_killed,
    "slow_worker": _slow_worker,
    "hung_mount": _hung_mount,
}
