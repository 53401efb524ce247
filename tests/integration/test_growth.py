"""Machines come and go during a run: the run follows them, and ends with the same weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from checkpointing import Keys, newest, open_store
from elastic.coordinator.agents import START_S
from elastic.protocol import events
from elastic.protocol.events import Event
from elastic.providers.ec2_spot import METADATA_VARIABLE
from elastic.ray_compat.groups import PlacementGroups
from elastic.ray_compat.placement import GroupView, Wanted, plan_placement
from elastic.reporting.event_log import read_events, read_steps
from tests.support import ROOT
from tests.support.autoscaling import AutoscaledCluster, autoscaled_cluster
from tests.support.draining import announce_drain
from tests.support.fakes.metadata import serve_metadata
from tests.support.gated_run import saved_weights
from tests.support.growing_run import STEPS
from tests.support.watching import actor_beside, wait_until

PROGRAM = ROOT / "tests/support/growing_run.py"
SOAK = pytest.mark.soak
PATIENCE_S = 150.0


@pytest.fixture
def machines() -> Iterator[Cluster]:
    """A cluster whose head has no room for workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        yield cluster
        cluster.shutdown()


class GrowingRun:
    """A run in a process of its own, and what its records say."""

    leaving: events.WorkerJoined
    """A worker on a machine that is to go."""

    def __init__(
        self,
        cluster: Cluster | AutoscaledCluster,
        storage: Path,
        *sizes: object,
        program: Path = PROGRAM,
    ) -> None:
        self.gate, self.root, self._log = storage / "gate", storage / "run", storage / "log"
        arguments = [cluster.address, storage, self.gate, *sizes]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(program), *map(str, arguments)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def events(self) -> list[Event]:
        return read_events(self.root / "events.jsonl")

    def wait_for(self, happened: Callable[[list[Event]], bool]) -> list[Event]:
        """Waits until the events so far satisfy `happened`."""
        deadline = time.monotonic() + PATIENCE_S
        while not happened(self.events()):
            assert self.process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.events()
            time.sleep(0.1)
        return self.events()

    def wait_for_replicas(self, count: int, *, after: int = 0) -> list[Event]:
        """Waits for a roster of `count` replicas later than event number `after`."""
        return self.wait_for(
            lambda all_: any(
                isinstance(e, events.RegroupDone) and e.replicas == count for e in all_[after:]
            )
        )

    def finish(self) -> str:
        """Opens the gate and waits for the end. Returns the hash of the weights."""
        self.gate.touch()
        self.process.wait(PATIENCE_S)
        assert self.process.returncode == 0, self._log.read_text()[-4000:]
        assert json.loads((self.root.parent / "left.json").read_text()) == []
        assert [step.step for step in read_steps(self.root / "steps.jsonl")] == list(range(STEPS))
        manifest = newest(open_store(self.root / "checkpoints"), Keys())
        assert manifest is not None and manifest.step == STEPS
        return saved_weights(self.root / "checkpoints", STEPS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


StartRun = Callable[..., GrowingRun]


@pytest.fixture
def start_run(machines: Cluster, tmp_path: Path) -> Iterator[StartRun]:
    runs: list[GrowingRun] = []

    def start(
        *, replicas: int = 2, minimum: int = 1, shard: int = 1, spares: int = 0
    ) -> GrowingRun:
        storage = tmp_path / str(len(runs))
        storage.mkdir()
        runs.append(GrowingRun(machines, storage, replicas, minimum, shard, spares))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def undisturbed(start: StartRun, shard: int = 1) -> str:
    """The hash of the weights when nothing happens, on the machines that are there now."""
    run = start(shard=shard)
    return run.finish()


def joined(all_: list[Event]) -> list[events.WorkerJoined]:
    return [e for e in all_ if isinstance(e, events.WorkerJoined)]


def lost(all_: list[Event]) -> list[events.WorkerLost]:
    return [e for e in all_ if isinstance(e, events.WorkerLost)]


@SOAK
@pytest.mark.parametrize("shard", [1, 2])
def test_a_machine_that_arrives_becomes_a_replica(
    machines: Cluster, start_run: StartRun, shard: int
) -> None:
    machines.add_node(num_cpus=shard)
    run = start_run(shard=shard)
    run.wait_for_replicas(1)
    machines.add_node(num_cpus=shard)
    happened = run.wait_for_replicas(2)
    weights = run.finish()
    assert len(joined(happened)) == 2 * shard and not lost(run.events())
    assert len({worker.node for worker in joined(happened)}) == 2
    assert weights == undisturbed(start_run, shard)


@SOAK
def test_rays_autoscaler_brings_the_first_machines(tmp_path: Path) -> None:
    """The cluster is scaled to zero: it has machines only while somebody asks for them."""
    with autoscaled_cluster(least=0, most=2) as cluster:
        run = GrowingRun(cluster, tmp_path, 2, 2, 1, 0)
        try:
            run.wait_for_replicas(2)
            run.finish()
            assert {*cluster.living_nodes()} == {worker.node for worker in joined(run.events())}
        finally:
            run.close()


@SOAK
def test_a_start_does_without_a_machine_that_ray_only_believes_in(
    machines: Cluster, start_run: StartRun
) -> None:
    # Ray places one group at a time, on the machine where most is left over. Where the first one's
    # does not answer, all wait for it, and there is nothing that a run could do about it.
    machines.add_node(num_cpus=3)
    raylet = machines.add_node(num_cpus=2).all_processes["raylet"][0].process
    raylet.send_signal(signal.SIGSTOP)  # Ray counts its CPU until it has missed its health checks
    try:
        run = start_run(shard=2)
        happened = run.wait_for_replicas(1)  # a worker that may come is waited for twice as long
        assert len(joined(happened)) == 2
    finally:
        raylet.send_signal(signal.SIGCONT)
    run.finish()


@SOAK
@pytest.mark.parametrize("shard", [1, 2])
def test_a_machine_is_lost_and_another_one_arrives(
    machines: Cluster, start_run: StartRun, shard: int
) -> None:
    machines.add_node(num_cpus=shard)
    second = machines.add_node(num_cpus=shard)
    run = start_run(shard=shard)
    before = len(run.wait_for_replicas(2))
    machines.remove_node(second, allow_graceful=False)
    alone = len(run.wait_for_replicas(1, after=before))
    machines.add_node(num_cpus=shard)
    run.wait_for_replicas(2, after=alone)
    weights = run.finish()
    assert len(lost(run.events())) == shard and len(joined(run.events())) == 3 * shard
    assert weights == undisturbed(start_run, shard)


@SOAK
def test_below_the_minimum_it_says_what_is_missing_and_waits(
    machines: Cluster, start_run: StartRun
) -> None:
    machines.add_node(num_cpus=1)
    second = machines.add_node(num_cpus=1)
    run = start_run(minimum=2)
    before = len(run.wait_for_replicas(2))
    machines.remove_node(second, allow_graceful=False)
    happened = run.wait_for(
        lambda all_: any(isinstance(e, events.BelowMinimum) for e in all_[before:])
    )
    missing = [e for e in happened if isinstance(e, events.BelowMinimum)][-1]
    assert (missing.alive, missing.needed) == (1, 2) and missing.missing.startswith("1 workers")
    machines.add_node(num_cpus=1)
    run.wait_for_replicas(2, after=len(happened))
    weights = run.finish()
    lost_steps = [e.lost_steps for e in run.events() if isinstance(e, events.RegroupDone)]
    assert not any(lost_steps)  # the survivor kept the state in memory
    assert weights == undisturbed(start_run)


@contextlib.contextmanager
def taken_cpu(cluster: Cluster, node_id: str) -> Iterator[None]:
    """Another job has a CPU of the node meanwhile."""
    program = [sys.executable, str(ROOT / "tests/support/taken_cpu.py"), cluster.address, node_id]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"taken\n"
        yield
        other.communicate()


def spot_notice() -> bytes:
    """That a machine will be taken away in two minutes, as EC2 says it."""
    at = datetime.fromtimestamp(time.time() + 120, timezone.utc)
    return json.dumps({"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"}).encode()


def trains_whole(event: events.Event) -> bool:
    """Whether a roster stands in which two replicas train."""
    return isinstance(event, events.RegroupDone) and len(event.lanes) == 2 == sum(
        bool(lanes) for lanes in event.lanes.values()
    )


def successor_has_taken_over(all_: list[Event]) -> bool:
    """Whether two replicas train after the others have left the machine."""
    called = (i for i, e in enumerate(all_) if getattr(e, "reason", None) == "drain")
    left = next(called, len(all_))
    return any(map(trains_whole, all_[left:]))


@SOAK
@pytest.mark.parametrize(("notice", "minimum"), [("ray", 1), ("ray", 2), ("spot", 2)])
def test_a_machine_that_will_go_is_left_with_nothing_repeated(
    machines: Cluster, start_run: StartRun, notice: str, minimum: int
) -> None:
    """Its successor is there before it goes. With `minimum` 2 it stays until that has caught up."""
    machines.add_node(num_cpus=1)
    with serve_metadata() as (url, metadata):
        # Its free CPU must not be used.
        second = machines.add_node(num_cpus=2, env_vars={METADATA_VARIABLE: url})
        with taken_cpu(machines, second.node_id):
            run = start_run(minimum=minimum)
            before = len(run.wait_for(lambda all_: any(map(trains_whole, all_))))
        if notice == "ray":
            announce_drain(machines.address, second.node_id)
        else:
            metadata.notice = spot_notice()
        third = machines.add_node(num_cpus=1)
        happened = run.wait_for(successor_has_taken_over)
    assert [worker.node for worker in joined(happened)][2:] == [third.node_id], happened
    wrote = {Path(log).name for w in joined(happened) if w.node == second.node_id for log in w.logs}
    kept = run.root / "logs" / second.node_id
    assert wrote and {path.name for path in kept.iterdir()} == wrote
    machines.remove_node(second, allow_graceful=False)
    happened = run.wait_for(lambda all_: bool(lost(all_)))
    assert [(e.node, e.cause) for e in lost(happened)] == [(second.node_id, "preemption")]
    weights = run.finish()
    rosters = [e for e in run.events()[before:] if isinstance(e, events.RegroupDone)]
    assert {(e.outcome, e.repeated_steps, e.lost_steps) for e in rosters} == {("boundary", 0, 0)}
    assert min(len(e.lanes) for e in rosters) >= minimum
    assert rosters[-1].lanes.keys() == {"0", "1"}
    assert weights == undisturbed(start_run)


@SOAK
def test_a_machine_is_lost_while_another_agent_starts_there(
    machines: Cluster, start_run: StartRun
) -> None:
    """Nobody is left to say so: it is waited for no longer than an agent may take to start."""
    for _ in range(2):
        second = machines.add_node(num_cpus=1)
    run = start_run()
    (victim,) = [w for w in joined(run.wait_for_replicas(2)) if w.node == second.node_id]
    os.kill(actor_beside(victim.pid, "NodeAgent"), signal.SIGKILL)
    run.wait_for(lambda all_: any(isinstance(e, events.AgentEnded) for e in all_))
    machines.remove_node(second, allow_graceful=False)
    gone_s = time.time()
    happened = run.wait_for(lambda all_: bool(lost(all_)))
    assert [(e.worker, e.cause) for e in lost(happened)] == [(victim.worker, "ray_node")]
    assert lost(happened)[0].time - gone_s < START_S + 5, lost(happened)
    run.finish()
    assert len(lost(run.events())) == 1


def has_moved(all_: list[Event]) -> bool:
    """Whether the roster stands that a replica on several machines was left for."""
    called = (i for i, e in enumerate(all_) if getattr(e, "reason", None) == "move")
    return any(isinstance(e, events.RegroupDone) for e in all_[next(called, len(all_)) :])


@SOAK
def test_a_replica_on_two_machines_moves_to_one(machines: Cluster, start_run: StartRun) -> None:
    """There was none with room for it at the start. Nothing is lost by it and nothing repeated."""
    for _ in range(2):
        machines.add_node(num_cpus=1)
    run = start_run(replicas=1, shard=2, spares=2)
    run.wait_for_replicas(1)
    assert len({worker.node for worker in joined(run.events())}) == 2
    whole = machines.add_node(num_cpus=2)
    happened = run.wait_for(has_moved)
    moved = {worker.worker for worker in joined(happened) if worker.node == whole.node_id}
    *_, successor = (e for e in happened if isinstance(e, events.ReplicaForming))
    assert set(successor.workers) == moved
    assert run.finish() == undisturbed(start_run, 2)
    assert not lost(run.events())
    rosters = [e for e in run.events() if isinstance(e, events.RegroupDone)]
    assert not any(e.repeated_steps or e.lost_steps for e in rosters)
    assert [sorted(e.lanes) for e in rosters] == [["0"], ["0", "1"], ["0"]]


@SOAK
def test_a_whole_machine_is_asked_for_where_only_pieces_are_free(machines: Cluster) -> None:
    """Nobody is started on the pieces, and none is held."""
    for cpus in (2, 1, 1):
        machines.add_node(num_cpus=cpus)
    wanted = Wanted(replicas=2, workers_per_replica=2, spares=0, together=2)
    asked: list[tuple[tuple[int, ...], bool]] = []
    ray.init(address=machines.address, log_to_driver=False)
    groups = PlacementGroups("pieces/", {"CPU": 1}, least=2, wait_s=60.0, is_over=lambda: False)

    def place() -> list[set[str]]:
        """One turn of the controller. Returns the nodes of each group that is placed."""
        views = []
        for name, size in groups:
            state, nodes = groups.look(name)
            none: frozenset[int] = frozenset()
            views.append(
                GroupView(
                    name=name,
                    size=size,
                    state=state,
                    living=none,
                    starting=none,
                    draining=none,
                    nodes=nodes if state == "placed" else {},
                )
            )
        plan = plan_placement(wanted, views, 8)
        for name in plan.give_up:
            groups.remove(name)
        for size in plan.ask:
            groups.ask(size, on_one_node=plan.on_one_node)
        if plan.ask:
            asked.append((plan.ask, plan.on_one_node))
        return [set(view.nodes.values()) for view in views if view.state == "placed"]

    try:
        wait_until(lambda: place() and len(asked) == 2)
        assert asked == [((2, 2), False), ((2,), True)]
        assert [len(nodes) for nodes in place()] == [1]
        whole = machines.add_node(num_cpus=2)
        wait_until(lambda: {whole.node_id} in place())
        assert len(asked) == 2
    finally:
        groups.shutdown()
        ray.shutdown()


@pytest.fixture
def failing_run(machines: Cluster, start_run: StartRun) -> GrowingRun:
    """A run of two replicas, of which the machine of one, `leaving`, is to go; its coordinator was
    killed after that, and one that was started anew has taken it up."""
    machines.add_node(num_cpus=1)
    second = machines.add_node(num_cpus=1)
    run = start_run(minimum=2)
    before = run.wait_for(lambda all_: any(map(trains_whole, all_)))
    (run.leaving,) = [worker for worker in joined(before) if worker.node == second.node_id]
    announce_drain(machines.address, second.node_id)
    run.wait_for(lambda all_: any(isinstance(e, events.Draining) for e in all_))
    (first,) = [e for e in before if isinstance(e, events.CoordinatorStarted)]
    os.kill(first.pid, signal.SIGKILL)
    happened = run.wait_for(lambda all_: any(getattr(e, "anew", False) for e in all_))
    anew_s = next(e.time for e in happened if getattr(e, "anew", False))
    steps = run.root / "steps.jsonl"
    run.wait_for(lambda _: any(step.time > anew_s for step in read_steps(steps)))
    return run


@SOAK
def test_the_coordinator_is_lost_while_a_machine_is_to_go(
    machines: Cluster, start_run: StartRun, failing_run: GrowingRun
) -> None:
    """Ray starts nothing on a machine that it drains, so nobody watches the workers there for the
    new coordinator. They are not lost for that."""
    third = machines.add_node(num_cpus=1)
    happened = failing_run.wait_for(successor_has_taken_over)
    assert not lost(happened)
    assert [worker.node for worker in joined(happened)][2:] == [third.node_id]
    weights = failing_run.finish()
    rosters = [e for e in failing_run.events() if isinstance(e, events.RegroupDone)]
    assert not any(e.repeated_steps or e.lost_steps for e in rosters)
    assert weights == undisturbed(start_run)


@SOAK
def test_a_worker_dies_on_a_machine_to_go_after_the_coordinator(
    machines: Cluster, start_run: StartRun, failing_run: GrowingRun
) -> None:
    """Ray sees its end."""
    leaving = failing_run.leaving
    os.kill(leaving.pid, signal.SIGKILL)
    happened = failing_run.wait_for(lambda all_: bool(lost(all_)))
    assert [(e.worker, e.cause) for e in lost(happened)] == [(leaving.worker, "preemption")]
    assert lost(happened)[0].detail == f"process {leaving.pid} ended, as Ray saw"
    machines.add_node(num_cpus=1)
    failing_run.wait_for_replicas(2, after=len(happened))
    assert failing_run.finish() == undisturbed(start_run)
    assert len(lost(failing_run.events())) == 1


@SOAK
def test_a_run_ends_on_a_machine_to_go_after_the_coordinator(
    start_run: StartRun, failing_run: GrowingRun
) -> None:
    """The uploader there went with the coordinator, and Ray starts no other: the worker writes its
    part of the last checkpoint itself."""
    assert failing_run.finish() == undisturbed(start_run)
    saved = [e for e in failing_run.events() if isinstance(e, events.CheckpointCommitted)]
    assert [e.step for e in saved] == [STEPS] and not lost(failing_run.events())
