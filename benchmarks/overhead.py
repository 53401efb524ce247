"""What fault tolerance costs in a step without faults: our loop against plain FSDP2.

    python -m benchmarks.overhead [--shard 2] [--rounds 30]

Takes about three minutes. Two replicas on Gloo, each `--shard` processes of one thread:

    plain   an ordinary loop: fully_shard on a replicate x shard mesh, fused AdamW, clip_grad_norm_
    fast    our TrainLoop, Engine and CrossGroup with reduction="fast" (a plain all-reduce)
    exact   the same with reduction="exact" (the fixed tree over lanes)

All have the same model, weights and micro-batches, which is checked by their losses. Each has its
own processes; they take turns, a block of steps each, the others waiting, so that what else the
machine does meets all alike. A ratio is the median over the rounds of (block of ours) / (block of
plain in the same round).

"measure" says what "ratio", the worse one of the two reductions, is a ratio of: "wall" where the
blocks of the plain loop agree within 5% (half of them lie that close together), else "cpu": CPU
time of all processes. Both are in "systems".
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import end_properly, print_result, say, scratch, show_table
from benchmarks._link import QuietLink

REPLICAS = 2
SYSTEMS = ("plain", "fast", "exact")
WALL_SPREAD = 0.05

Runner = Callable[[], float]
"""Does one step and returns its loss."""


def make_task(directory: Path, options: argparse.Namespace) -> tuple[Any, Any]:
    """The prepared task and the train settings, for all systems."""
    from elastic import (
        CausalLM,
        DataConfig,
        ModelConfig,
        OptimizerConfig,
        ParallelConfig,
        TrainConfig,
    )

    words = np.random.default_rng(7).integers(0, 1000, 60_000)
    (directory / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    settings = {
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1024,
        "max_position_embeddings": options.seq_len,
    }
    task = CausalLM(
        model=ModelConfig(settings=settings),
        data=DataConfig(paths=(str(directory / "text.txt"),), vocab_size=1024, holdout=0.0),
        seq_len=options.seq_len,
    )
    train = TrainConfig(
        task=task,
        steps=1_000_000,
        global_batch=REPLICAS * options.shard * options.samples,
        lanes=REPLICAS,
        parallel=ParallelConfig(shard=options.shard),
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=2, clip_norm=1.0),
    )
    return task.prepare(train, str(directory)), train


# -- one process -----------------------------------------------------------------------------------


def work(system: str, index: int, port: int, task: Any, train: Any, line: Any) -> None:
    """A worker: builds its part, then does as many steps as it is told, again and again."""
    import torch

    torch.set_num_threads(1)
    make = make_plain if system == "plain" else make_ours
    step = make(system, index, port, task, train)
    while count := line.recv():
        began_s, began_cpu_s = time.perf_counter(), cpu_s()
        for _ in range(count):
            loss = step()
        line.send((time.perf_counter() - began_s, cpu_s() - began_cpu_s, loss))


def cpu_s() -> float:
    """CPU seconds of this process, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make_plain(system: str, index: int, port: int, task: Any, train: Any) -> Runner:
    """The loop that one would write without fault tolerance."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from trainer.parallel.apply import fill, local_slices, materialize
    from trainer.parallel.layout import slot_of
    from trainer.parallel.tensor import decoder_layers
    from trainer.samples import lane_ids
    from trainer.schedule import learning_rate

    shard = train.parallel.shard
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=index, world_size=REPLICAS * shard)
    mesh = init_device_mesh("cpu", (REPLICAS, shard), mesh_dim_names=("replicate", "shard"))
    model, source = task.build(train.seed)
    for name in decoder_layers(model):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    replica, rank = divmod(index, shard)
    slices = local_slices(model, slot_of(replica, rank, 1), shard=shard, tensor=1)
    materialize(model, torch.device("cpu"))
    fill(model, slices, source)
    params = list(model.parameters())
    settings = train.optimizer
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in params if p.dim() >= 2],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    data, micro = task.train_data(), train.micro_samples(REPLICAS)
    done = 0

    def step() -> float:
        nonlocal done
        ids = lane_ids(train, REPLICAS, len(data), done, replica, rank)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, done, train.steps)
        total = 0.0
        for start in range(0, len(ids), micro):
            batch = data.batch(ids[start : start + micro])
            loss, terms = task.loss(model, batch)
            (loss / (terms * len(ids) // micro)).backward()
            total += float(loss.detach()) / (terms * len(ids) // micro)
        torch.nn.utils.clip_grad_norm_(params, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        mean = torch.tensor([total])
        dist.all_reduce(mean)  # the loss that an ordinary loop logs
        return float(mean) / (REPLICAS * shard)

    return step


def make_ours(system: str, index: int, port: int, task: Any, train: Any) -> Runner:
    """Our loop, as `elastic/worker.py` sets it up."""
    import dataclasses

    from trainer.backend.groups import make_replica_group
    from trainer.backend.rendezvous import Rendezvous
    from trainer.engine import Engine
    from trainer.lane_sums import LaneSums
    from trainer.lanes import deal_lanes
    from trainer.link import LoopConfig, Progress
    from trainer.loop import TrainLoop
    from trainer.parallel.layout import slot_of
    from trainer.replicas import CrossGroup

    train = dataclasses.replace(train, reduction=system)
    replica, rank = divmod(index, train.parallel.workers)
    rendezvous = Rendezvous(host="127.0.0.1", port=port, timeout_s=300)
    mesh = make_replica_group(
        rendezvous,
        f"replica/{replica}",
        rank=rank,
        shard=train.parallel.shard,
        tensor=1,
        device="cpu",
    )
    engine = Engine(
        task,
        train,
        slot=slot_of(replica, rank, 1),
        mesh=mesh,
        device="cpu",
        max_replicas=REPLICAS,
    )
    engine.initialize()
    dealt = deal_lanes(REPLICAS, tuple(range(REPLICAS)))
    cross = CrossGroup(
        rendezvous,
        f"cross/{rank}",
        lanes=[dealt[r] for r in range(REPLICAS)],
        total_lanes=REPLICAS,
        rank=replica,
        device="cpu",
        leave_now=lambda: False,
    )
    loop = TrainLoop(
        engine,
        cross,
        LaneSums(REPLICAS, engine.gradient.numel(), engine.device),
        lanes=dealt[replica],
        progress=Progress(),
        config=LoopConfig(
            lanes=REPLICAS, save_every=None, compare_every=None, max_nonfinite_steps=2
        ),
        link=QuietLink(),
    )

    def step() -> float:
        commit = loop.try_step()
        assert commit is not None
        loop.finish_step(commit)
        loop.save_and_evaluate()
        return commit.loss

    return step


# -- the parent ------------------------------------------------------------------------------------


class Group:
    """The processes of one system."""

    def __init__(self, system: str, workers: int, task: Any, train: Any) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.lines, self.processes = [], []
        for index in range(workers):
            here, there = context.Pipe()
            process = context.Process(
                target=work,
                args=(system, index, self._store.port, task, train, there),
                daemon=True,
            )
            process.start()
            there.close()
            self.lines.append(here)
            self.processes.append(process)

    def block(self, steps: int) -> tuple[float, float, float]:
        """Runs a block. Returns wall seconds and CPU seconds a step, and the last loss."""
        for line in self.lines:
            line.send(steps)
        found = [line.recv() for line in self.lines]
        wall_s = max(wall for wall, _, _ in found) / steps
        return wall_s, sum(cpu for _, cpu, _ in found) / steps, found[0][2]

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Every system's blocks: (wall seconds, CPU seconds) a step."""
    with scratch("overhead") as directory:
        task, train = make_task(directory, options)
        say(f"{task.info['parameters']:,} parameters, {REPLICAS} x {options.shard} processes each")
        workers = REPLICAS * options.shard
        groups: dict[str, Group] = {}
        try:
            for system in SYSTEMS:
                groups[system] = Group(system, workers, task, train)
            for group in groups.values():
                group.block(options.block)
            return _rounds(groups, options)
        finally:
            for group in groups.values():
                group.close()


def _rounds(
    groups: dict[str, Group], options: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    blocks: dict[str, list[tuple[float, float]]] = {system: [] for system in SYSTEMS}
    for number in range(options.rounds):
        losses = {}
        for turn in range(len(SYSTEMS)):
            system = SYSTEMS[(number + turn) % len(SYSTEMS)]
            wall_s, spent_s, losses[system] = groups[system].block(options.block)
            blocks[system].append((wall_s, spent_s))
        worst = max(abs(loss / losses["plain"] - 1) for loss in losses.values())
        assert worst < 1e-3, f"the systems do not compute the same: {losses}"
        if number % 10 == 9:
            say(f"round {number + 1} of {options.rounds}, losses {losses}")
    return blocks


def summarise(blocks: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians, ratios against the plain loop of the same round, and what to go by."""
    systems: dict[str, dict[str, float]] = {}
    for system, found in blocks.items():
        systems[system] = {
            "wall_ms": round(1e3 * statistics.median(wall for wall, _ in found), 3),
            "cpu_ms": round(1e3 * statistics.median(cpu for _, cpu in found), 3),
        }
        for column, name in enumerate(("wall_ratio", "cpu_ratio")):
            pairs = zip(found, blocks["plain"], strict=True)
            ratio = statistics.median(ours[column] / plain[column] for ours, plain in pairs)
            systems[system][name] = round(ratio, 4)
    low, middle, high = statistics.quantiles([wall for wall, _ in blocks["plain"]], n=4)
    spread = (high - low) / middle
    measure = "wall" if spread <= WALL_SPREAD else "cpu"
    ratio = max(systems[name][f"{measure}_ratio"] for name in ("fast", "exact"))
    return {
        "ratio": ratio,
        "measure": measure,
        "wall_spread": round(spread, 4),
        "systems": systems,
    }


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shard", type=int, default=1, help="processes in a replica (default 1)")
    add("--rounds", type=int, default=30, help="blocks of each system (default 30)")
    add("--block", type=int, default=4, help="steps in a block (default 4)")
    add("--hidden", type=int, default=256, help="hidden size of the model (default 256)")
    add("--layers", type=int, default=4, help="its layers (default 4)")
    add("--seq-len", type=int, default=128, help="tokens in a sample (default 128)")
    add("--samples", type=int, default=4, help="samples of a worker in a step (default 4)")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_arguments()
    end_properly()
    result = summarise(measure(options))
    show_table("time of a step, against a plain FSDP2 loop", result["systems"])
    print_result(result)


if __name__ == "__main__":
    main()
