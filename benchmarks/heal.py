"""What a heal costs a healthy replica: `python -m benchmarks.heal`.

Two processes on Gloo: a replica that trains, and a newcomer that receives its state. In each
repeat the newcomer first enters with its state already there (the pace to compare with), then heals
while the other trains, and then heals while the other does nothing (the wire alone: bytes by the
kernel's counter of the loopback device, which wants a machine with nothing else on it).

stall_s: the longest step while healing, less the median step without a heal.
step_time_ratio_while_healing: median step while healing / median step without.
heal_bytes_ratio: bytes on the wire / bytes of state.
source_memory_ratio, newcomer_memory_ratio: the most memory that each took for it / bytes of state.
catch_up_steps: steps that the newcomer had to make up for.

With `--shard N`, instead, runs on Ray with two replicas and a spare, of which one worker is killed:
replicas of one worker and of N in turns.

rejoin_s, rejoin_s_one: from the news of its death until its replica has lanes again, for replicas
of N workers and of one.
bytes_ratio, bytes_ratio_one: state received / state of one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks._common import (
    end_properly,
    median_of,
    print_result,
    ray_cluster,
    say,
    show_table,
)
from benchmarks._heal_runs import STATE_BYTES_PER_PARAMETER, WIDTH, lose_one
from elastic import CustomTask, ParallelConfig, TrainConfig
from tests.support.quiet_link import QuietLink
from trainer.backend.groups import make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.steps import TrainLoop
from trainer.parallel.layout import ParallelDims, Slot
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import STREAMS, Meeting
from trainer.replication.replicas import CrossGroup
from trainer.replication.step_commit import Commit

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Setup:
    """One run of the benchmark."""

    state_mib: int
    steps: int
    repeats: int
    batch: int
    streams: int


class Numbers:
    """Random vectors."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index / 4096)


def make_task(setup: Setup) -> CustomTask:
    """Square layers, as many as the state needs."""
    layers = max(1, setup.state_mib * 2**20 // STATE_BYTES_PER_PARAMETER // WIDTH**2)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers + 1)))

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().mean(), 1

    return CustomTask(build_model=build, loss_function=loss, dataset=Numbers())


@dataclass
class Recorder(QuietLink):
    """The loop's Link, for one generation."""

    stop_at: int
    times: list[float] = field(default_factory=list)
    healed: Newcomer | None = None
    healed_at: int | None = None

    def leave_at_boundary(self) -> bool:
        return len(self.times) + 1 >= self.stop_at

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        self.times.append(time.monotonic())

    def caught_up(self, newcomer: Newcomer) -> None:
        self.healed, self.healed_at = newcomer, len(self.times)

    def heal_failed(self, reason: str) -> None:
        raise RuntimeError(reason)


class Replica:
    """One process: a replica of one worker."""

    def __init__(self, rank: int, port: int, setup: Setup) -> None:
        torch.set_num_threads(1)
        self.rank, self.setup = rank, setup
        self.rendezvous = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.train = TrainConfig(
            task=None, steps=10**6, global_batch=setup.batch, parallel=ParallelConfig()
        )
        mesh = make_replica_group(
            self.rendezvous, f"replica/{rank}", rank=0, dims=ParallelDims(), device="cpu"
        )
        self.engine = Engine(
            make_task(setup),
            self.train,
            slot=Slot(replica=rank, rank=0, dims=ParallelDims()),
            mesh=mesh,
            device="cpu",
            max_replicas=2,
        )
        self.engine.initialize()
        self.progress = Progress()

    def generation(self, name: str, heals: bool) -> Recorder:
        """Trains `steps` steps with the newcomer in the roster."""
        link = Recorder(self.setup.steps)
        cross = CrossGroup(
            self.rendezvous,
            f"cross/{name}",
            lanes=[(0,), ()],
            total_lanes=1,
            rank=self.rank,
            device="cpu",
            leave_now=link.leave_now,
        )
        heal = self.begin_heal(name) if heals else None
        loop = TrainLoop(
            self.engine,
            cross,
            self.engine.make_sums(1, 1),
            lanes=[(0,), ()][self.rank],
            progress=self.progress,
            config=LoopConfig(
                lanes=1,
                save_every=None,
                snapshot_every=None,
                compare_every=None,
                max_nonfinite_steps=5,
                until=self.engine.train_config.steps,
            ),
            link=link,
            source=heal if isinstance(heal, Source) else None,
            newcomer=heal if isinstance(heal, Newcomer) else None,
            part="joining" if isinstance(heal, Newcomer) else "whole",
        )
        loop.run()
        cross.close()
        if heal is not None:
            heal.close()
        return link

    def begin_heal(self, name: str) -> Source | Newcomer:
        """The two parts of a heal."""
        meeting = Meeting(
            rendezvous=self.rendezvous,
            prefix=f"heal/{name}",
            secret=b"of the benchmark",
            streams=self.setup.streams,
        )
        if self.rank == 0:
            return Source(self.engine, 0, meeting)
        return Newcomer(self.engine, meeting, clip_norm=self.train.optimizer.clip_norm)

    def wire_alone(self, name: str) -> dict[str, float]:
        """A heal while nobody trains: seconds, bytes on the loopback device, and memory taken."""
        before, started = loopback_bytes(), time.monotonic()
        held = forget_peak()
        heal = self.begin_heal(name)
        if isinstance(heal, Newcomer):
            while not heal.caught_up:
                time.sleep(0.001)
            self.store.set(f"{name}/done", "")
        self.store.wait([f"{name}/done"])
        result = {
            "s": time.monotonic() - started,
            "bytes": loopback_bytes() - before,
            "memory": memory_bytes("VmHWM") - held,
        }
        heal.close()
        return result


def loopback_bytes() -> int:
    """Bytes that the loopback device has sent so far."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def memory_bytes(kind: str) -> int:
    """Of this process's memory: VmRSS, what it has, or VmHWM, the most that it had."""
    status = Path("/proc/self/status").read_text().splitlines()
    (row,) = (line for line in status if line.startswith(f"{kind}:"))
    return int(row.split()[1]) * 1024


def forget_peak() -> int:
    """From now on VmHWM is counted anew. Returns what the process has.

    Source: proc_pid_clear_refs(5).
    """
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


def work(rank: int, port: int, setup: Setup, results: Any) -> None:
    """One process."""
    replica = Replica(rank, port, setup)
    found = []
    for repeat in range(setup.repeats):
        quiet = replica.generation(f"{repeat}/quiet", heals=False)
        healing = replica.generation(f"{repeat}/heal", heals=True)
        alone = replica.wire_alone(f"{repeat}/alone")
        healed = healing.healed
        found.append(
            {
                "quiet": quiet.times,
                "heal": healing.times,
                "healed_at": healing.healed_at,
                "behind": None if healed is None else healed.steps_behind,
                "bytes": None if healed is None else healed.bytes,
                "alone": alone,
            }
        )
    results[rank] = found


def step_times(times: list[float]) -> list[float]:
    """Seconds of each step but the first, which is not whole."""
    return [b - a for a, b in itertools.pairwise(times)]


def evaluate(source: dict[str, Any], newcomer: dict[str, Any]) -> dict[str, float]:
    """The figures of one repeat."""
    if newcomer["healed_at"] is None:
        raise RuntimeError("the heal took longer than the run: raise --steps")
    base = statistics.median(step_times(source["quiet"])[1:])
    healing = step_times(source["heal"])[: newcomer["healed_at"]]
    return {
        "stall_s": max(0.0, max(healing) - base),
        "step_time_ratio_while_healing": statistics.median(healing) / base,
        "heal_bytes_ratio": source["alone"]["bytes"] / newcomer["bytes"],
        "source_memory_ratio": source["alone"]["memory"] / newcomer["bytes"],
        "newcomer_memory_ratio": newcomer["alone"]["memory"] / newcomer["bytes"],
        "catch_up_steps": newcomer["behind"],
        "step_s": base,
        "wire_s": newcomer["alone"]["s"],
    }


def lose_workers(shard: int, state_mib: int, repeats: int) -> None:
    """The part with `--shard`."""
    end_properly()
    rows: list[dict[str, float]] = []
    with contextlib.redirect_stdout(sys.stderr), ray_cluster(2 * shard + 1):
        for repeat in range(repeats):
            one, many = lose_one(1, state_mib), lose_one(shard, state_mib)
            rows.append({**many, **{f"{name}_one": value for name, value in one.items()}})
            say(f"repeat {repeat}: {rows[-1]}")
    sizes = {"shard": shard, "state_mib": state_mib, "cores": os.cpu_count()}
    print_result({**median_of(rows), **sizes})


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state-mib", type=int, default=256, help="state of a worker (256)")
    parser.add_argument("--steps", type=int, default=24, help="steps in a measurement (24)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements (3)")
    parser.add_argument("--batch", type=int, default=64, help="samples in a step (64)")
    parser.add_argument("--streams", type=int, default=STREAMS, help=f"connections ({STREAMS})")
    parser.add_argument("--shard", type=int, help="lose one of so many workers of a replica")
    options = parser.parse_args()
    if options.shard is not None:
        lose_workers(options.shard, options.state_mib, options.repeats)
        return
    setup = Setup(options.state_mib, options.steps, options.repeats, options.batch, options.streams)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        say(f"{setup.repeats} heals of {setup.state_mib} MiB, {os.cpu_count()} cores")
        mp.start_processes(work, args=(store.port, setup, results), nprocs=2, start_method="fork")
        repeats = [evaluate(a, b) for a, b in zip(results[0], results[1], strict=True)]
    show_table("heal", {f"repeat {i}": row for i, row in enumerate(repeats)})
    print_result({**median_of(repeats), "state_mib": setup.state_mib, "cores": os.cpu_count()})


if __name__ == "__main__":
    main()
