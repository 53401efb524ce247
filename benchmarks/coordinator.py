"""The coordinator at 1,024 to 16,384 workers: a lost node, and the nodes' heartbeats.

    python -m benchmarks.coordinator [--workers 1024 4096 16384]

Takes some minutes. A node is a replica of eight workers.

regroup_s: one node is lost -> every other worker has met its peers in the store. That is roster_s
and store_s, one after the other; in a run they overlap, as the store has a thread of its own.

roster_s: one node is lost -> every other worker has its part of the new roster. The real
Coordinator and Membership run on this process's event loop; each simulated worker is two tasks, one
in `watch` and one that answers a call with `join`, as `elastic/worker/coordinator_link.py` does it.
Each report is unpickled on arrival and each answer pickled, as an actor does. A report holds the
commit of the last step, with a digest for each of 512 lanes, and that of the first worker of a
replica the steps that the lead may not have sent (records_bytes, all together). Ray's own cost for
a call is not in it.

store_s: every worker meets its peers in the coordinator's store, all at once, with the calls that
it makes on NCCL (`_store_load.py`). The store is hosted as the coordinator does it; the workers are
real connections from one other process, which has most of the work. store_cpu_s is the store's own
part. Of the store_connections of a worker, one is used; sockets_real counts those that are open,
as many as this machine lets one process have. Where these are fewer than the workers, only so many
meet, and store_s and store_cpu_s are scaled up (extrapolated_from workers; null where all meet).

cpu_share: the share of one core that a Ray actor needs to take a heartbeat from every node each
second and to answer it, measured as CPU time of the actor's process at that rate (where one sender
cannot keep the rate up: at the rate it can, scaled). The heartbeats are datagrams from this
process, each node's from a socket of its own. call_cpu_share is the same for calls to the actor,
which the nodes fall back on where datagrams do not get through.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle

from benchmarks._common import (
    end_properly,
    median_of,
    print_result,
    ray_cluster,
    say,
    scratch,
    show_table,
)
from benchmarks._store_load import Meeting, StoreLoad, store_load
from checkpointing import CheckpointConfig
from elastic import HealthConfig
from elastic.coordinator.actor import Coordinator
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.listening import host_store, open_beats
from elastic.membership.decisions import GroupConfig
from elastic.node.beats import BeatListener, BeatSender, name_of
from elastic.protocol import causes, events
from elastic.protocol.messages import Build, Identity, Report, Run
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from trainer.backend.rendezvous import CONNECTIONS
from trainer.loop.samples import Ledger
from trainer.parallel.layout import ParallelDims
from trainer.replication.step_commit import Commit

_OTHER_DESCRIPTORS = 200
"""Of this process, beside the store's."""

NODE = 8
LANES, STEP = 512, 20
RECENT = 2
"""Steps that fit between two of the lead's words to the coordinator, at five steps a second."""
LEDGER = Ledger(seed=0, global_batch=LANES, lanes=LANES, samples=100_000)
BEAT_INTERVAL_S = HealthConfig().node_beat_s


@functools.cache
def digests(step: int) -> list[int]:
    """Of the samples that a step must take, one for each lane."""
    return LEDGER.digests(step)


class LocalCoordinator(Coordinator):
    """The coordinator without node agents: the benchmark tells it itself which node is lost."""

    async def hello(self, identity: Identity) -> None:
        """Registers a worker; no agent is started for its node."""
        self._workers.started[identity.worker] = identity
        self._records.note(
            events.WorkerJoined(
                time=time.time(),
                worker=identity.worker,
                node=identity.node,
                pid=identity.pid,
                born_ticks=identity.born_ticks,
            )
        )

    async def node_lost(self, node: str) -> None:
        """What follows when a node's agent is gone."""
        await self._workers.lose_node(node, "lost by the benchmark", causes.NODE)

    async def worker_lost(self, worker: str) -> None:
        """What follows when a worker's process has ended."""
        await self._workers.lose(worker, causes.CRASH, "lost by the benchmark")


class SimulatedWorker:
    """Follows every call at once, and notes when it has its part of a roster."""

    def __init__(self, coordinator: LocalCoordinator, number: int) -> None:
        self.coordinator = coordinator
        self.identity = Identity(
            worker=f"w{number}-{number:06x}", rank=number, node=f"n{number // NODE}", pid=number
        )
        self.built, self.generation = 0, 0
        self.tasks: list[asyncio.Task[None]] = []
        self.called = asyncio.Event()
        self.fault = b""

    def report_of_a_fault(self) -> bytes:
        """What it will send when it is called; made beforehand, on its own machine as it were."""
        step = STEP - 1
        commit = Commit(
            step=step,
            loss=2.0,
            grad_norm=1.0,
            tokens=10,
            digests=np.asarray(digests(step)).tobytes(),
            boundary=False,
        )
        report = Report(
            identity=self.identity,
            built=self.built,
            generation=self.generation,
            step=STEP,
            in_step=True,
            last=commit,
            recent=self.recent(),
        )
        return cloudpickle.dumps(report)

    def recent(self) -> tuple[events.StepRecord, ...]:
        """What the first worker of a replica shows of the steps: those that the lead had no time to
        send."""
        if self.identity.rank % NODE:
            return ()
        return tuple(
            events.StepRecord(
                step=step,
                loss=2.0,
                grad_norm=1.0,
                lr=1e-3,
                tokens=10,
                time=time.time(),
                generation=self.generation,
                replicas=1,
                sample_digests=digests(step),
            )
            for step in range(STEP - RECENT, STEP)
        )

    async def live(self) -> None:
        """Joins, builds, and takes part in one roster after the other."""
        await self.coordinator.hello(self.identity)
        self.tasks.append(asyncio.create_task(self.watch()))
        report = pickle.dumps(Report(identity=self.identity))
        while True:
            answer = await self.coordinator.join(pickle.loads(report))
            sent = cloudpickle.dumps(answer)
            assert sent
            if isinstance(answer, Build):
                self.built = answer.formed
                report = pickle.dumps(Report(identity=self.identity, built=self.built))
                continue
            assert isinstance(answer, Run)
            self.generation = answer.generation
            await self.called.wait()
            self.called.clear()
            report = self.fault

    async def cancel(self) -> None:
        """Ends it where it is."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def watch(self) -> None:
        """Waits for calls."""
        seen = 0
        while True:
            signal = await self.coordinator.watch(self.identity.worker, seen)
            assert signal is not None
            seen = signal.serial
            self.called.set()


async def regroup(
    workers: int, repeats: int, directory: Path, store: StoreLoad
) -> list[dict[str, float]]:
    """Loses `repeats` nodes, one after the other.

    Args:
        workers: how many there are.
        repeats: see above.
        directory: for the records.
        store: has the connections of the first workers, or of all.

    Returns:
        For each: seconds until everybody has the new roster and has met, and this process's CPU
        seconds.
    """
    coordinator = LocalCoordinator(_config(workers, directory))
    group = [SimulatedWorker(coordinator, number) for number in range(workers)]
    for worker in group:
        worker.tasks.append(asyncio.create_task(worker.live()))
    await _until_generation(group, 1)
    found = []
    for repeat in range(repeats):
        lost, group = group[:NODE], group[NODE:]
        for task in (task for worker in lost for task in worker.tasks):
            task.cancel()
        for worker in group:
            worker.fault = worker.report_of_a_fault()
        gc.collect()
        gc.freeze()  # the simulated workers live elsewhere
        records = sum(len(pickle.dumps(worker.recent())) for worker in group)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        await coordinator.node_lost(lost[0].identity.node)
        await _until_generation(group, repeat + 2)
        roster_s, roster_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        meeting = Meeting(
            generation=repeat + 2,
            workers=range(NODE * (repeat + 1), store.workers),
            groups=NODE,
        )
        share = len(meeting.workers) / len(group)
        began_cpu_s = time.process_time()
        store_s = store.meet(meeting) / share
        found.append(
            {
                "regroup_s": roster_s + store_s,
                "roster_s": roster_s,
                "roster_cpu_s": roster_cpu_s,
                "store_s": store_s,
                "store_cpu_s": (time.process_time() - began_cpu_s) / share,
                "records_bytes": records,
            }
        )
    for task in (task for worker in group for task in worker.tasks):
        task.cancel()
    return found


def regroups_at(workers: int, repeats: int) -> dict[str, float | None]:
    """Medians of `regroup`, and what connections were real."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    sockets = min(CONNECTIONS * workers, descriptors - _OTHER_DESCRIPTORS)
    speaking = min(workers, sockets) // NODE * NODE
    store = host_store("127.0.0.1")
    with scratch("coordinator") as directory:
        with store_load(store.port, speaking, sockets - speaking) as load:
            runs = asyncio.run(regroup(workers, repeats, directory, load))
        for meeting in load.met:  # as torch's own client reads it
            count = store.get(f"{meeting.prefix(NODE - 1)}/here/count")
            assert int(count) == meeting.members, f"{count} of {meeting.members} have met"
    return {
        **median_of(runs),
        "store_connections": CONNECTIONS,
        "sockets_real": sockets,
        "extrapolated_from": None if speaking == workers else speaking,
    }


async def _until_generation(group: list[SimulatedWorker], generation: int) -> None:
    for worker in group:
        while worker.generation < generation:
            await asyncio.sleep(0)


def _config(workers: int, directory: Path) -> CoordinatorConfig:
    replicas = workers // NODE
    return CoordinatorConfig(
        groups=GroupConfig(
            max_replicas=replicas,
            min_replicas=1,
            dims=ParallelDims(shard=NODE),
            lanes=LANES,
            steps=1000,
            start_workers=workers,
            max_regroups_without_progress=8,
        ),
        paths=RunPaths(root=directory),
        identity=RunIdentity(id="r"),
        prefix="benchmark/",
        health=HealthConfig(max_crashes=workers),
        checkpoint=CheckpointConfig(every_steps=None),
        generation=0,
        restore_step=0,
        snapshot=None,
        faults=(),
        ledger=LEDGER,
        started=events.RunStarted(
            time=time.time(), name="bench", layout={}, steps=1000, start_step=0, versions={}
        ),
    )


class Beats:
    """An actor that takes the nodes' heartbeats and counts its CPU time."""

    def __init__(self) -> None:
        self.renewed_s: dict[str, float] = {}

    async def listen(self, tokens: list[str]) -> tuple[str, int]:
        """Takes datagrams from now on. Returns the address to send them to."""
        listening, by_name = open_beats("127.0.0.1"), {name_of(token): token for token in tokens}
        await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: BeatListener(by_name, self.renew, lambda token, paces: None), sock=listening
        )
        return listening.getsockname()

    def renew(self, node: str) -> bool:
        """What a heartbeat does."""
        self.renewed_s[node] = time.monotonic()
        return True

    async def beat(self, node: str, token: str, deaths: list[Any]) -> bool:
        """The call that a node falls back on."""
        return self.renew(node) and not deaths and bool(token)

    async def cpu_s(self) -> float:
        """CPU seconds of this process, Ray's threads in it included."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime


def heartbeats(nodes: int, seconds: float) -> dict[str, float]:
    """Heartbeats of `nodes` nodes by datagram, and then by call."""
    import ray

    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100_000}
    actor: Any = ray.remote(**options)(Beats).remote()
    sent = by_datagram(actor, nodes, seconds)
    called = by_call(actor, nodes, seconds)
    ray.kill(actor)
    return {**sent, **{f"call_{name}": value for name, value in called.items()}}


def by_datagram(actor: Any, nodes: int, seconds: float) -> dict[str, float]:
    """Sends beats as the node agents do."""
    import ray

    tokens = [f"token of {node}" for node in range(nodes)]
    address = ray.get(actor.listen.remote(tokens))
    senders = [BeatSender(address, token) for token in tokens]

    def send(numbers: range) -> None:
        for number in numbers:
            senders[number % nodes].hear()  # the answer to its last one
            senders[number % nodes].send(time.monotonic())
        time.sleep(0.005)

    found = share_of_a_core(actor, nodes, seconds, send)
    time.sleep(0.1)
    heard = [sender.hear() for sender in senders]
    unanswered = sum(sender.unanswered for sender in senders)
    assert all(it is None or it.kept for it in heard)
    for sender in senders:
        sender.close()
    return {**found, "unanswered": unanswered}


def by_call(actor: Any, nodes: int, seconds: float) -> dict[str, float]:
    """Makes the call instead."""
    import ray

    pending: list[Any] = []

    def call(numbers: range) -> None:
        pending.extend(actor.beat.remote(f"n{n % nodes}", "0" * 32, []) for n in numbers)
        if len(pending) > 512:
            ray.get(pending)
            pending.clear()
        else:
            time.sleep(0.005)

    return share_of_a_core(actor, nodes, seconds, call)


def share_of_a_core(
    actor: Any, nodes: int, seconds: float, beat: Callable[[range], None]
) -> dict[str, float]:
    """Has `beat` make the beats that are due, spread evenly, and measures what they cost."""
    import ray

    wanted_per_s = nodes / BEAT_INTERVAL_S
    began_cpu_s, began_s, done = ray.get(actor.cpu_s.remote()), time.monotonic(), 0
    while (elapsed_s := time.monotonic() - began_s) < seconds:
        due = max(done, min(int(elapsed_s * wanted_per_s), done + 256))
        beat(range(done, due))
        done = due
    spent_s = ray.get(actor.cpu_s.remote()) - began_cpu_s
    return {"cpu_share": spent_s / done * wanted_per_s, "beats_per_s": done / elapsed_s}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1024, 4096, 16384], help="simulated workers"
    )
    parser.add_argument("--repeats", type=int, default=5, help="nodes lost at each size")
    parser.add_argument("--beat-seconds", type=float, default=3.0, help="of heartbeats, each time")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_arguments()
    end_properly()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each node
    found: dict[str, dict[str, float | None]] = {}
    for workers in options.workers:
        found[str(workers)] = regroups_at(workers, options.repeats)
        say(f"{workers} workers: {found[str(workers)]}")
    with ray_cluster(1):
        for workers in options.workers:
            beats = [heartbeats(workers // NODE, options.beat_seconds) for _ in range(3)]
            found[str(workers)].update(median_of(beats))
            say(f"{workers} workers: {found[str(workers)]}")
    show_table("one node of 8 lost; heartbeats every second", found)
    print_result(
        {
            "workers": found,
            "notes": {
                "roster_s": "real Coordinator and Membership in one process on an event loop, "
                "every report unpickled, every answer pickled once; without Ray's cost of a call",
                "store_s": "real TCPStore, a real connection for each worker that meets, all from "
                "one process on this machine",
                "cpu_share": "of one core: a real Ray actor that takes heartbeats as datagrams and "
                "answers them; call_cpu_share: as calls, the fallback. `unanswered` is of beats in "
                "the last second",
            },
        }
    )


if __name__ == "__main__":
    main()
