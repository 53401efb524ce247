"""What a run sees of each process-level fault, made by the functions that its coordinator and its
node agents decide with: `decide_frozen`, `find_standstill`, `find_stuck`, `decide_lost_nodes`,
`find_failed` and `find_culprits`.

What these are fed is made here, without processes: the states of processes, the places of workers,
leases, tests of connections. `benchmarks.detection` injects the same faults for real, one worker
each; here are all of them at all places.

Four machines with a replica of two workers each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from elastic.membership.links import describe, find_culprits, find_failed
from elastic.protocol import causes, events
from elastic.protocol.messages import LinkTest
from elastic.protocol.roster import Replica, Roster
from health.frozen import Sample, decide_frozen, observe
from health.heartbeat import Record
from health.judgement import judge
from health.laggards import Position, find_stuck
from health.lease import decide_lost_nodes
from health.progress import Place, find_standstill
from health.reading import Kind, Reading
from health.signatures import find_sign
from health.verdict import Sign

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
    scene = Scene(victim=WORKERS[RANKS[place]], phase=PHASES[phase], rng=random.Random(name))
    expected = _ACTS[fault](scene)
    return Case(name=name, events=run_events(scene.happened), expected=expected, origin="generated")


def run_events(happened: Iterable[events.Event]) -> list[events.Event]:
    """The events of a run in which something happened."""
    found: list[events.Event] = [
        events.WorkerJoined(time=1.0, worker=worker, node=NODE_OF[worker], pid=rank, born_ticks=1)
        for rank, worker in enumerate(WORKERS)
    ]
    found += [
        events.ReplicaForming(time=2.0, formed=i + 1, replica=i, workers=list(mates_at(i)))
        for i in range(len(NODES))
    ]
    return [*found, *sorted(happened, key=lambda event: event.time)]


def mates_at(index: int) -> tuple[str, str]:
    """The workers of a replica."""
    return WORKERS[2 * index], WORKERS[2 * index + 1]


def lost(worker: str, cause: causes.Cause, detail: str, time: float = TIME) -> events.WorkerLost:
    """The loss of a worker, as the coordinator records it."""
    rank = WORKERS.index(worker)
    return events.WorkerLost(
        time=time,
        worker=worker,
        node=NODE_OF[worker],
        pid=rank,
        slot=f"replica {rank // 2} shard {rank % 2} tensor 0",
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
    rng: random.Random
    happened: list[events.Event] = field(default_factory=list)

    @property
    def node(self) -> str:
        """The victim's machine."""
        return NODE_OF[self.victim]

    @property
    def mates(self) -> tuple[str, ...]:
        """The workers of its replica, which are those of its machine."""
        return mates_at(NODES.index(self.node))

    def lose(self, worker: str, cause: causes.Cause, detail: str) -> None:
        """A worker is lost; the others often notice first, when a connection closes."""
        self.happened.append(lost(worker, cause, detail))
        if self.rng.random() < 0.7:
            self.break_off(f"[gloo] Connection closed by peer [10.0.0.{self.rng.randrange(9)}]:71")

    def break_off(self, reason: str) -> None:
        """A collective across replicas has failed."""
        other = next(n for n in NODES if n != self.node)
        index = NODES.index(other)
        self.happened.append(
            events.CrossGroupLost(
                time=TIME - self.rng.random(),
                generation=3,
                slot=f"replica {index} shard 0 tensor 0",
                reason=reason,
                worker=mates_at(index)[0],
                node=other,
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
    verdict = decide_frozen(scene.victim, history, freeze_timeout_s=10.0)
    if verdict is not None:
        detail = f"process 4711 is frozen: {verdict.evidence[0]}; it was in {scene.phase}"
        scene.lose(scene.victim, causes.Cause(verdict.cause), detail)
    return _only(scene, causes.HANG)


def _exception(scene: Scene) -> Expected:
    error = scene.rng.choice(
        ("ValueError: labels out of range", "KeyError: 'tokens'", "RuntimeError: bad batch")
    )
    detail = f'Traceback (most recent call last):\n  File "task.py", line 7, in loss\n{error}'
    scene.lose(scene.victim, causes.USER_ERROR, detail)
    return _only(scene, causes.USER_ERROR)


def _stand_still(scene: Scene, mates_phase: str) -> None:
    """The victim stays in its phase. Its mates have begun one collective more, and wait there; the
    other replicas wait in the reduction. Two looks, as the coordinator takes them."""
    stuck_s = 6.0 + scene.rng.random()
    if scene.phase == "reduce":
        _do_not_come(scene, stuck_s)
        return
    places = [
        {
            worker: _place(worker, scene, stuck_s, mates_phase)
            for worker in mates_at(NODES.index(node))
        }
        for node in NODES
    ]
    found = find_standstill(places, 4.5, _STEPS_S, shared_s=300.0)
    for suspect in found.suspects:
        detail = f"it keeps the others: {suspect.evidence} (health.progress_timeout_s)"
        scene.lose(suspect.worker, causes.HANG, detail)


def _place(worker: str, scene: Scene, stuck_s: float, mates_phase: str) -> Place:
    waits = worker not in scene.mates
    phase = "reduce" if waits else scene.phase if worker == scene.victim else mates_phase
    return Place(
        mark=70,
        phase=f"{phase} of step 9",
        in_phase_s=stuck_s + (0.0 if worker == scene.victim else 0.2),
        bound="pace",
        waits=waits,
        collectives=12 if worker == scene.victim else 13,
        longest_s=0.4,
    )


def _do_not_come(scene: Scene, stuck_s: float) -> None:
    """All wait for each other, the victim for good: they are called, and it does not come."""
    scene.break_off(f"no step for {stuck_s:.1f} s, and all wait for each other")
    positions: dict[str, Position | None] = {
        scene.victim: Position(phase="reduce of step 9", in_phase_s=301.0, waits=True)
    }
    stuck, _ = find_stuck(positions, 300.0)
    for worker in stuck:
        detail = "did not regroup in 300 s (health.regroup_timeout_s): for 301 s in reduce"
        scene.lose(worker, causes.HANG, detail)


def _user_loop(scene: Scene) -> Expected:
    _stand_still(scene, scene.phase)
    return _only(scene, causes.HANG)


def _peer_loop(scene: Scene) -> Expected:
    """The same, with mates that are phases ahead and seem as busy."""
    _stand_still(scene, "backward")
    return _only(scene, causes.HANG)


def _hung_mount(scene: Scene) -> Expected:
    _stand_still(scene, scene.phase)
    if scene.rng.random() < 0.5:
        line = "nfs: server 10.0.3.7 not responding, still trying"
        sign = find_sign(line, "kernel", scene.node, TIME + 20, {})
        scene.happened.append(shown(scene.node, [sign] if sign else [], TIME + 20))
    return _only(scene, causes.HANG)


def _network_cut(scene: Scene) -> Expected:
    renewed_s = {node: 99.5 if node != scene.node else 94.0 for node in NODES}
    for _, age_s in decide_lost_nodes(renewed_s, 100.0, 5.0).items():
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


def _mtu_black_hole(scene: Scene) -> Expected:
    """Every test over the victim's machine comes short, both ways."""
    replicas = tuple(Replica(index=i, formed=i + 1, workers=mates_at(i)) for i in range(4))
    roster = Roster(generation=4, replicas=replicas, lanes={i: (i,) for i in range(4)})
    bad = NODES.index(scene.node)
    tests = {
        worker: LinkTest(
            generation=4,
            short={p: 1448 for p in range(4) if p != rank // 2 and bad in (p, rank // 2)},
            of_bytes=262_144,
            bound_s=10.0,
        )
        for rank, worker in enumerate(WORKERS)
    }
    failed = find_failed(roster, tests)
    culprits = sorted(find_culprits(failed, roster, NODE_OF))
    scene.break_off("[gloo] Timed out waiting 10000ms for recv operation to complete")
    scene.happened.append(
        events.LinksTested(time=TIME, generation=4, count=len(failed), failed=[], removed=culprits)
    )
    for worker in culprits:
        detail = f"connections fail: {describe(failed, NODE_OF)}"
        scene.happened.append(lost(worker, causes.LINK, detail))
    return _machine(scene, causes.LINK)


def _slow_worker(scene: Scene) -> Expected:
    """Ten minutes of readings of all workers. Its mates wait for it inside the replica, where that
    does not show: the replica is named as a whole."""
    for node in NODES:
        histories: dict[tuple[Kind, str], list[Reading]] = {
            ("worker", worker): _pace(worker, scene) for worker in mates_at(NODES.index(node))
        }
        scene.happened.append(shown(node, judge(histories, node, TIME), TIME))
    workers = frozenset(scene.mates)
    return Expected(cause=causes.SLOW, workers=workers, spared=frozenset(WORKERS) - workers)


def _pace(worker: str, scene: Scene) -> list[Reading]:
    waiting = 0.0 if worker in scene.mates else 0.4
    waits = [scene.rng.random() < waiting for _ in range(120)]
    return [
        Reading(
            kind="worker",
            of=worker,
            at_s=5.0 * index,
            values={
                "cpu_s": 4.0 * index,
                "marks": 40.0 * index,
                "waits": float(wait),
                "works": float(not wait),
                "in_kernel": 0.0,
            },
        )
        for index, wait in enumerate(waits)
    ]


_ACTS: dict[str, Callable[[Scene], Expected]] = {
    "sigkill": _sigkill,
    "sigstop": lambda scene: _freeze(scene, "T", 0.4),
    "lock_held": lambda scene: _freeze(scene, "R", 10.4),
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
