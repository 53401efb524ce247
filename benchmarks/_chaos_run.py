"""One run of the soak on real machines: what is done to it, and what is looked at afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.cluster_utils import Cluster

from benchmarks._chaos import (
    HEALTH,
    LANES,
    STEPS,
    Action,
    Deed,
    Layout,
    Schedule,
    find_needless_restores,
)
from benchmarks._chaos_losses import (
    find_missed_faults,
    find_unexplained_losses,
    find_unfired,
    find_wrong_causes,
)
from benchmarks._chaos_stalls import find_long_stalls
from checkpointing import CheckpointConfig
from elastic.protocol import events
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events, read_steps
from health.process import read_born_ticks, read_state
from tests.support.draining import announce_drain
from tests.support.paced import paced_task
from tests.support.tiny import Outcome, fit, tiny_train, tiny_trainer

_E = TypeVar("_E", bound=events.Event)
_Done = tuple[str | None, Callable[[], bool]]
"""The machine that something was done to, and a look whether the cluster has taken notice."""

ROOM_FOR_ALL = 12
NOTICE_S = 20.0
"""The longest pause for the cluster to take notice of something."""
_LOOK_S = 0.02
_OF_RAY = ("_AutoscalingCoordinatorActor", "DatasetManager")
"""Ray's own, one of each in a cluster, for as long as the cluster lasts."""


class Machines:
    """Machines that a run has, beside one for its driver that has no room for workers."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": 200 << 20,
            },
        )
        ray.init(address=self.cluster.address, log_to_driver=False)
        self._nodes: list[tuple[int, Any]] = []

    def have(self, cpus: tuple[int, ...]) -> None:
        """Sees to it that there are these machines and no others."""
        if [size for size, _ in self._nodes] != list(cpus):
            while self._nodes:
                self.remove()
            for size in cpus:
                self.add(size)

    def add(self, cpus: int) -> str:
        """One more. Returns Ray's id of it."""
        node = self.cluster.add_node(num_cpus=cpus, object_store_memory=100 << 20)
        self._nodes.append((cpus, node))
        return str(node.node_id)

    def remove(self, at: int = -1) -> str:
        """The newest, or another one, is gone without a word. Returns its id."""
        _, node = self._nodes.pop(at)
        self.cluster.remove_node(node, allow_graceful=False)
        return str(node.node_id)

    def drain(self) -> str:
        """Ray is told that the newest will go, as autoscalers do. Returns its id."""
        node_id = str(self._nodes[-1][1].node_id)
        announce_drain(self.cluster.address, node_id)
        return node_id

    def close(self) -> None:
        """All go."""
        ray.shutdown()
        self.cluster.shutdown()


class Hand:
    """Does to a run what its schedule says, each thing when its step is recorded. It works on the
    main thread, where alone Ray starts machines; the run is on another one."""

    def __init__(
        self, schedule: Schedule, machines: Machines, root: Path, pause: Path, run: threading.Thread
    ) -> None:
        self._schedule, self._machines, self._pause = schedule, machines, pause
        self._paths, self._run = RunPaths(root=root), run
        self.deeds: list[Deed] = []
        """What was done; less than all where the run was over before."""
        self._left = -1

    def work(self) -> None:
        """Returns when all is done or the run is over."""
        for action in self._schedule.actions:
            while not self._due(action):
                self._run.join(_LOOK_S)
                if not self._run.is_alive():
                    return
            self.deeds.append(self._do(action))

    def _due(self, action: Action) -> bool:
        steps = self._paths.steps
        recorded = steps.read_bytes().count(b"\n") if steps.exists() else 0
        happened = self._events(events.Event)
        stuck = bool(happened) and isinstance(happened[-1], events.BelowMinimum)
        return recorded >= action.step or (stuck and action.kind == "add")

    def _do(self, action: Action) -> Deed:
        began = time.time()
        if action.paused:
            self._pause.touch()
        try:
            node, noticed = getattr(self, f"_{action.kind}")()
            until = time.monotonic() + NOTICE_S
            while action.paused and not noticed() and time.monotonic() < until:
                self._run.join(_LOOK_S)
        finally:
            self._pause.unlink(missing_ok=True)
        return Deed(action=action, began=began, ended=time.time(), node=node)

    def _add(self) -> _Done:
        node = self._machines.add(self._schedule.layout.workers)
        return node, lambda: any(e.node == node for e in self._events(events.WorkerJoined))

    def _remove(self) -> _Done:
        node = self._machines.remove(self._left)
        return node, lambda: any(e.node == node for e in self._events(events.WorkerLost))

    def _drain(self) -> _Done:
        node = self._machines.drain()
        self._left = 1  # it stays the second machine, whatever comes
        return node, lambda: bool(self._events(events.Draining))

    def _coordinator(self) -> _Done:
        started = self._events(events.CoordinatorStarted)
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[-1].pid, signal.SIGKILL)
        return None, lambda: len(self._events(events.CoordinatorStarted)) > len(started)

    def _events(self, kind: type[_E]) -> list[_E]:
        return [e for e in read_events(self._paths.events) if isinstance(e, kind)]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a run."""

    error: str | None
    """Why it did not finish."""
    ledger_exact: bool
    """Every sample was used exactly once."""
    bitwise_equal: bool
    """Weights, losses and samples are those of the undisturbed run, and of all replicas."""
    faults_fired: int
    """Injected faults that went off, each worker counted."""
    faults_unfired: int
    """Those that were drawn and did not, each slot counted; one that should have is a complaint."""
    actions_done: int
    """Things done to the cluster."""
    complaints: tuple[str, ...]
    """What else was wrong."""
    left_behind: tuple[str, ...]
    """What was still there after it."""
    wall_s: float
    """From the start to the end."""

    @property
    def good(self) -> bool:
        """Whether nothing was wrong."""
        wrong = self.error or self.complaints or self.left_behind
        return self.ledger_exact and self.bitwise_equal and not wrong


def run_undisturbed(schedule: Schedule, text: Path, storage: Path, machines: Machines) -> Outcome:
    """The run that all others of its shard x tensor are compared with: one replica, no fault."""
    machines.have((ROOM_FOR_ALL,))
    layout = schedule.layout
    return fit(
        tiny_trainer(
            text,
            storage,
            name=f"undisturbed-{layout.shard}x{layout.tensor}",
            replicas=1,
            **_settings(layout),
        )
    )


def run_schedule(
    schedule: Schedule, text: Path, storage: Path, machines: Machines, whole: Outcome
) -> Verdict:
    """Runs one schedule and looks at everything."""
    machines.have(schedule.machines or (ROOM_FOR_ALL,))
    name = f"seed-{schedule.seed}"
    root, pause = storage / name, storage / f"{name}.pause"
    began = time.monotonic()
    ends: list[Outcome | Exception] = []

    def run() -> None:
        try:
            ends.append(fit(_trainer(schedule, text, storage, name)))
        except Exception as failure:
            ends.append(failure)

    thread = threading.Thread(target=run, name="run")
    thread.start()
    hand = Hand(schedule, machines, root, pause, thread)
    try:
        hand.work()
    finally:
        thread.join()
    outcome = ends[0] if isinstance(ends[0], Outcome) else None
    error = None if outcome else f"{type(ends[0]).__name__}: {ends[0]}"
    happened = read_events(RunPaths(root=root).events)
    return Verdict(
        error=error,
        ledger_exact=outcome is not None and outcome.samples == whole.samples,
        bitwise_equal=outcome is not None
        and outcome.report["replicas_equal"] is True
        and (outcome.params, outcome.losses) == (whole.params, whole.losses),
        faults_fired=0 if outcome is None else outcome.report["faults_fired"],
        faults_unfired=len(find_unfired(happened, schedule.faults, schedule.layout)),
        actions_done=len(hand.deeds),
        complaints=tuple(_complaints(schedule, root, hand.deeds)) if error is None else (),
        left_behind=tuple(find_left_behind(root)),
        wall_s=time.monotonic() - began,
    )


def _settings(layout: Layout) -> dict[str, Any]:
    """What a run has in common with the undisturbed one. A lane has a sample for each shard rank,
    and two at least."""
    return {
        "shard": layout.shard,
        "tensor": layout.tensor,
        "lanes": LANES,
        "global_batch": LANES * max(2, layout.shard),
        "steps": STEPS,
    }


def _trainer(schedule: Schedule, text: Path, storage: Path, name: str) -> Any:
    layout = schedule.layout
    return tiny_trainer(
        text,
        storage,
        name=name,
        train=tiny_train(
            text,
            task=paced_task(text, storage, name, layout.replicas, schedule.patience_s),
            eval_every=10,
            **_settings(layout),
        ),
        replicas=layout.replicas,
        min_replicas=schedule.min_replicas,
        spares=schedule.spares,
        faults=",".join(map(str, schedule.faults)) or "none",
        checkpoint=CheckpointConfig(
            every_steps=schedule.save_every, memory_every=schedule.memory_every
        ),
        health=HEALTH,
    )


def _complaints(schedule: Schedule, root: Path, deeds: Sequence[Deed]) -> Iterator[str]:
    """What the records of a finished run must not show."""
    paths, faults, layout = RunPaths(root=root), schedule.faults, schedule.layout
    happened = read_events(paths.events)
    every = read_all_steps(paths.steps)
    yield from find_wrong_causes(happened, faults, deeds)
    yield from find_unexplained_losses(happened, deeds)
    yield from find_missed_faults(happened, every, faults, layout)
    least = schedule.min_replicas * layout.workers
    yield from find_long_stalls(happened, every, HEALTH, least_workers=least, deeds=deeds)
    for generation in find_needless_restores(happened, every, layout.workers):
        yield f"generation {generation} went back although a whole copy lived"
    for event in happened:
        if isinstance(event, events.RegroupDone) and event.repeated_steps > 1:
            yield f"generation {event.generation} repeated {event.repeated_steps} steps"
    if [step.step for step in read_steps(paths.steps)] != list(range(STEPS)):
        yield "the records lack steps"


def read_all_steps(path: Path) -> list[events.StepRecord]:
    """Every whole step record of a file, also of steps that were lost later."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [events.StepRecord(**json.loads(line)) for line in lines]


# -- what a run may not leave behind ---------------------------------------------------------------


def find_left_behind(root: Path, patience_s: float = 15.0) -> list[str]:
    """Processes, actors, shared memory and placement groups of a run that is over.

    Ray ends actors in its own time: what is there is looked at again for a while.
    """
    until = time.monotonic() + patience_s
    while (left := _look_for_left_behind(root)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _look_for_left_behind(root: Path) -> list[str]:
    paths = RunPaths(root=root)
    pids: dict[int, float] = {}
    for event in read_events(paths.events):
        if isinstance(event, events.WorkerJoined | events.CoordinatorStarted):
            pids[event.pid] = event.time
    left = [f"process {pid}" for pid, joined in pids.items() if _lives(pid, joined)]
    if paths.memory.exists():
        left.append(str(paths.memory))
    left += [
        f"placement group {row['name']} {row['state']}"
        for row in ray.util.placement_group_table().values()
        if row["state"] != "REMOVED"
    ]
    left += [
        f"actor {row['ActorClassName']} {row['State']}"
        for row in ray._private.state.actors().values()
        if row["State"] != "DEAD" and row["ActorClassName"] not in _OF_RAY
    ]
    return left


def _lives(pid: int, joined: float) -> bool:
    """Whether the process that had this id at the time `joined` still runs."""
    state, born_ticks = read_state(pid), read_born_ticks(pid)
    if state is None or born_ticks is None:
        return False
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    started = time.time() - uptime_s + born_ticks / os.sysconf("SC_CLK_TCK")
    return state not in "ZX" and started < joined + 1.0
