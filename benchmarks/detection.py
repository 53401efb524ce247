"""How soon each kind of fault is found, whether the right worker is blamed for the right cause, and
how soon the healthy commit their next step.

    python -m benchmarks.detection [--faults sigkill user_loop ...] [--quiet-s 600]

Needs root (network namespaces) and some 15 minutes on two cores. One run of two replicas of two
workers and a spare, on four hosts that are network namespaces, at default settings. The faults come
one after the other, each when the run is whole again and its spare ready. Then nothing is at fault
for `--quiet-s`: there are steps that take five times as long now and then, garbage collections,
saves of 5 s, and an evaluation every 200 steps, in the first of which all compile something for
20 s. Every worker that is lost or found slow, and every regroup that is called meanwhile is a false
alarm.

verdict_s     from the fault to the event that names what was lost
resume_s      from the fault to the next step that the healthy commit
right_worker  those at fault were lost, or found slow, and nobody else; null where no worker is at
              fault
right_cause   by the cause that stands in that event
agent_cpu_share, idle_actor_cpu_share
              of a core, by a node's agent, and by a Ray actor that does nothing
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from benchmarks import _detection_run, _detection_store
from benchmarks._common import end_properly, print_result, say, scratch, show_table
from benchmarks._turns import cpu_s
from elastic.protocol import events
from health.heartbeat import Heartbeat
from tests.support.hosts import Hosts
from tests.support.local_cluster import local_cluster
from tests.support.run_on_hosts import PartitionRun

HOSTS, REPLICAS, SHARD = 4, 2, 2
SETTLE_S = 3.0
"""Between two faults, once the run is whole: some steps pass."""
AT_REST_SHARE = 0.2
"""Of a core: a spare that takes less has done what it does ahead."""
OBSERVED_S = 20.0
"""For how long processor time is counted; it comes in hundredths of a second."""
UNSEEN_S = 60.0
"""A fault that was not found by then is not found."""


@dataclass(frozen=True)
class Victim:
    """The worker that is hit: the last one of the second replica."""

    worker: str
    pid: int
    host: int
    mates: frozenset[str]
    """All workers of its host."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    causes: tuple[str, ...]
    """What the event may call it; none: no worker is at fault."""
    act: Callable[[PartitionRun, Victim], None]
    mend: Callable[[PartitionRun, Victim], None] = lambda run, victim: None
    node: bool = False
    """It takes all workers of the host along."""
    waits: bool = False
    """It hits when its time has come, which `act` waits for."""
    shown_by: type[events.Event] = events.WorkerLost
    """The event that names it."""


def told(task: str) -> Callable[[PartitionRun, Victim], None]:
    """The victim itself does it, at its next sample or in its next forward."""
    return lambda run, victim: (run.storage / f"{task}-{victim.pid}").touch()


def told_for_later(task: str) -> Callable[[PartitionRun, Victim], None]:
    """It does it some time, which is waited for."""

    def act(run: PartitionRun, victim: Victim) -> None:
        told(task)(run, victim)
        begun = run.storage / f"{task}-{victim.pid}"  # which the victim takes away
        _first(lambda: [] if begun.exists() else [victim])

    return act


def sent(number: int) -> Callable[[PartitionRun, Victim], None]:
    """A signal."""
    return lambda run, victim: os.kill(victim.pid, number)


def kill_raylet(run: PartitionRun, victim: Victim) -> None:
    """The raylet alone; Ray's processes on the host end with it."""
    os.kill(_process_of(run, victim, "raylet/raylet"), signal.SIGKILL)


def kill_agent(run: PartitionRun, victim: Victim) -> None:
    """The node's agent of this run."""
    os.kill(_process_of(run, victim, "ray::NodeAgent"), signal.SIGKILL)


def _process_of(run: PartitionRun, victim: Victim, command: str) -> int:
    for pid in run.hosts.processes(victim.host):
        with contextlib.suppress(OSError):
            if command in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                return pid
    raise LookupError(f"no {command} on host {victim.host}")


FAULTS: dict[str, Fault] = {
    "sigkill": Fault(("crash",), sent(signal.SIGKILL)),
    "sigstop": Fault(("hang",), sent(signal.SIGSTOP)),
    "lock_held": Fault(("hang",), told("hold")),
    "exception": Fault(("user_error",), told("raise")),
    "user_loop": Fault(("hang",), told("loop")),
    "peer_loop": Fault(("hang",), told("backward")),
    "evaluation_loop": Fault(("hang",), told_for_later("evaluate"), waits=True),
    "hung_mount": Fault(("hang",), told("mount")),
    "agent_killed": Fault((), kill_agent, shown_by=events.AgentEnded),
    "raylet_killed": Fault(
        ("ray_node", "crash"), kill_raylet, lambda run, v: run.hosts.start(v.host), node=True
    ),
    "network_cut": Fault(
        ("node",),
        lambda run, victim: run.hosts.cut(victim.host),
        lambda run, victim: restart(run, victim),
        node=True,
    ),
    "mtu_black_hole": Fault(
        ("link", "path"),  # by how many other machines show it
        lambda run, victim: run.hosts.lose(victim.host, 'iifname != "lo" meta length > 1000'),
        lambda run, victim: replace_lossy(run, victim),
        node=True,
    ),
    "slow_worker": Fault(("slow",), told("slow"), told("fast"), shown_by=events.StragglersFound),
}


def replace_lossy(run: PartitionRun, victim: Victim) -> None:
    """Another machine in the place of the one that gets no large packets: that one gets no slot any
    more."""
    run.hosts.lose_nothing(victim.host)
    restart(run, victim)


def restart(run: PartitionRun, victim: Victim) -> None:
    """The host is there again, as another machine."""
    run.hosts.restore(victim.host)
    run.hosts.kill(victim.host)
    run.hosts.start(victim.host)


# -- a fault, and what becomes of it ---------------------------------------------------------------


def find_victim(run: PartitionRun) -> Victim:
    """Of the run as it is now."""
    joined = {e.worker: e for e in run.of_kind(events.WorkerJoined)}
    gone = {e.worker for e in run.of_kind(events.WorkerLost)}
    formed = [e for e in run.of_kind(events.ReplicaForming) if not gone & set(e.workers)]
    worker = formed[-1].workers[-1]
    node = joined[worker].node
    mates = frozenset(w for w, e in joined.items() if e.node == node and w not in gone)
    pid = joined[worker].pid
    return Victim(worker=worker, pid=pid, host=run.hosts.host_of(pid), mates=mates)


def wait_for_spare(run: PartitionRun) -> None:
    """Until a spare is there again and at rest. One that starts takes a core, and where there are
    two, time in which a worker has none does not count against it."""
    pids: list[int] = []

    def joined() -> bool:
        gone = {e.worker for e in run.of_kind(events.WorkerLost)}
        placed = {w for e in run.of_kind(events.ReplicaForming) for w in e.workers}
        alive = [e for e in run.of_kind(events.WorkerJoined) if e.worker not in gone]
        pids[:] = [e.pid for e in alive if e.worker not in placed]
        return bool(pids)

    def at_rest() -> bool:
        before_s = cpu_s(pids)
        time.sleep(1.0)
        return joined() and all(
            spent_s - before_s.get(pid, 0.0) < AT_REST_SHARE for pid, spent_s in cpu_s(pids).items()
        )

    run.wait_until(joined)
    run.wait_until(at_rest)


def measure(run: PartitionRun, name: str) -> dict[str, Any]:
    """Does one fault to a run that is whole, and waits until it is whole again."""
    wait_for_spare(run)
    fault, victim = FAULTS[name], find_victim(run)
    generation = run.steps()[-1].generation
    began = time.time()
    fault.act(run, victim)
    if fault.waits:
        began = time.time()
    loses = fault.shown_by is events.WorkerLost
    found = _first(lambda: run.of_kind(fault.shown_by, after_s=began))
    verdict_s = found[0].time - began if found else None
    resumed = _first(
        lambda: [
            s for s in run.steps() if s.time > began and (not loses or s.generation > generation)
        ]
    )
    result: dict[str, Any] = {
        "verdict_s": None if verdict_s is None else round(verdict_s, 3),
        "resume_s": round(resumed[0].time - began, 3) if resumed else None,
    }
    fault.mend(run, victim)
    if found and loses:
        run.wait_for_replicas(REPLICAS, after_s=began)
    time.sleep(SETTLE_S)
    lost = run.of_kind(events.WorkerLost, after_s=began)
    slow = run.of_kind(events.StragglersFound, after_s=began)
    blamed = [(e.worker, e.cause) for e in lost] + [(w, "slow") for e in slow for w in e.workers]
    expected = victim.mates if fault.node else {victim.worker}
    if fault.causes:
        result["right_worker"] = {worker for worker, _ in blamed} == set(expected)
        result["right_cause"] = bool(blamed) and {c for _, c in blamed} <= set(fault.causes)
    else:
        result |= {"right_worker": None, "right_cause": bool(found) and not blamed}
    say(f"{name}: {result}; lost {[(e.worker, e.cause, e.detail) for e in lost]}")
    return result


def _first(look: Callable[[], list[Any]]) -> list[Any]:
    deadline = time.monotonic() + UNSEEN_S
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


# -- what watching costs ---------------------------------------------------------------------------


def agent_cpu_share(run: PartitionRun) -> float:
    """Share of a core that a node's agent takes."""
    return _cpu_share(_process_of(run, find_victim(run), "ray::NodeAgent"))


def idle_actor_cpu_share() -> float:
    """The same of an actor that does nothing: what of it is Ray's own."""
    with local_cluster():
        idle: Any = ray.remote(num_cpus=0)(_Idle).remote()  # it ends with its handle
        pid = ray.get(idle.pid.remote())
        time.sleep(SETTLE_S)
        return _cpu_share(pid)


class _Idle:
    def pid(self) -> int:
        return os.getpid()


def _cpu_share(pid: int) -> float:
    before_s = cpu_s([pid])[pid]
    time.sleep(OBSERVED_S)
    return round((cpu_s([pid])[pid] - before_s) / OBSERVED_S, 4)


def heartbeat_ns() -> float:
    """One mark of a phase, on the step path."""
    heartbeat = Heartbeat()
    count = 100_000
    return round(timeit.timeit(lambda: heartbeat.mark(7, 2), number=count) / count * 1e9, 1)


def told_of_noise(run: PartitionRun, after_s: float) -> str:
    """What took long since then."""
    times = [step.time for step in run.steps() if step.time > after_s]
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    saves = [e.seconds for e in run.of_kind(events.CheckpointCommitted, after_s=after_s)]
    return (
        f"{len(times)} steps, median {statistics.median(gaps):.2f} s, longest {gaps[-3:]}; "
        f"saves took {saves} s"
    )


@contextlib.contextmanager
def a_run(directory: Path) -> Iterator[PartitionRun]:
    """The run, whole and under way."""
    os.mkfifo(directory / "mount")
    packages = directory / "packages"
    _detection_store.install(packages)
    hosts = Hosts([2, 2, 2, 2])
    hosts.environment["PYTHONPATH"] += f":{packages}"
    with hosts:
        program = Path(_detection_run.__file__)
        run = PartitionRun(hosts, directory, REPLICAS, SHARD, program=program)
        try:
            run.wait_for_replicas(REPLICAS, after_s=0.0)
            run.under_way()
            yield run
            run.process.send_signal(signal.SIGINT)
            run.process.wait(UNSEEN_S)
        finally:
            run.close()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--quiet-s", type=float, default=600.0, help="how long it is left alone")
    options = parser.parse_args()
    end_properly()
    with contextlib.redirect_stdout(sys.stderr):
        with scratch("detection") as directory, a_run(directory) as run:
            results = {name: measure(run, name) for name in options.faults}
            cpu_share = agent_cpu_share(run)
            began = time.time()
            # Not within an evaluation: all are to compile in the same one.
            _first(
                lambda: [
                    s for s in run.steps()[-1:] if 20 < s.step % _detection_run.EVAL_EVERY < 100
                ]
            )
            (run.storage / _detection_store.NOISE).touch()
            time.sleep(options.quiet_s)
            alarms = len(run.of_kind(events.WorkerLost, after_s=began))
            alarms += len(run.of_kind(events.RegroupCalled, after_s=began))
            alarms += len(run.of_kind(events.StragglersFound, after_s=began))
            say(f"{options.quiet_s:g} s without a fault: {told_of_noise(run, began)}")
        show_table("Faults", results)
    print_result(
        {
            "faults": results,
            "false_alarms": alarms,
            "heartbeat_ns": heartbeat_ns(),
            "agent_cpu_share": cpu_share,
            "idle_actor_cpu_share": idle_actor_cpu_share(),
        }
    )


if __name__ == "__main__":
    main()
