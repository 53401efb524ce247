"""What the exact reduction costs: against a plain all-reduce, and in a step that overlaps it.

Each replica is a process with one lane; all are on this machine, over Gloo. The ways are timed in
turns within one run, after one turn that does not count. A time is that of the slowest replica, and
medians are over the turns.

1. The reduction alone, of a gradient that is all there: `exact`, `fast` (the trainer's other
   reduction, also in buckets), and one in-place all-reduce of the whole gradient.
2. A step of a small model: forward and backward alone, and with the exact reduction after it or
   overlapping with it. What a way adds to the first is its exposed time. On the bare loopback the
   transfers are work for the same processors, so there is little to hide; `--link` makes them wait.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks._common import limit_link
from trainer.backend.groups import make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.models.hf import ModelConfig
from trainer.parallel.layout import ParallelDims, Slot
from trainer.replication.buckets import BUCKET_BYTES, MERGED, plan_buckets
from trainer.replication.reduction import Reduction
from trainer.replication.replicas import CrossGroup
from trainer.tasks.causal_lm import PreparedCausalLM

Ways = dict[str, Callable[[], None]]


def main() -> None:
    """Runs the benchmark; the last line on stdout is one JSON object."""
    options = parse()
    if options.link:
        limit_link("benchmarks.reduction", options.link)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        arguments = (store.port, options, results)
        mp.start_processes(replica, args=arguments, nprocs=options.replicas, start_method="spawn")
        times = {
            way: [
                max(turn)
                for turn in zip(*(results[r][way] for r in range(options.replicas)), strict=True)
            ]
            for way in results[0]
        }
    report(options, {way: statistics.median(turns) for way, turns in times.items()}, times)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reduction", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="processes (2)")
    parser.add_argument("--mib", type=int, default=64, help="MiB of gradient in part 1 (64)")
    parser.add_argument(
        "--turns", type=int, default=9, help="timed turns; three times in part 1 (9)"
    )
    parser.add_argument("--layers", type=int, default=8, help="layers of the model in part 2 (8)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a lane in part 2 (512)")
    parser.add_argument(
        "--link", help="rate of the link between replicas, such as 4gbit; needs root, tc, unshare"
    )
    options = parser.parse_args()
    if options.replicas < 2 or options.turns < 5:
        parser.error("use 2 replicas or more, and 5 turns or more")
    return options


def replica(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """One process: both parts."""
    torch.set_num_threads(1)
    rendezvous = Rendezvous(host="127.0.0.1", port=port, timeout_s=300)
    cross = CrossGroup(
        rendezvous,
        "cross",
        lanes=[(lane,) for lane in range(options.replicas)],
        total_lanes=options.replicas,
        rank=rank,
        device="cpu",
        leave_now=lambda: False,
    )
    try:
        alone = turns(cross, 3 * options.turns, reductions(cross, options.mib * 2**20 // 4))
        step = turns(cross, options.turns, steps(cross, rendezvous, options))
        results[rank] = {**alone, **step}
    finally:
        cross.close()


def turns(cross: CrossGroup, count: int, ways: Ways) -> dict[str, list[float]]:
    """Seconds of each turn of each way. Every turn begins together."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(count + 1):
        for way, act in ways.items():
            cross.sum(torch.zeros(1))
            started = time.perf_counter()
            act()
            if turn:
                times[way].append(time.perf_counter() - started)
    return times


def reductions(cross: CrossGroup, count: int) -> Ways:
    """Part 1: the whole gradient is there."""
    into, plain = torch.randn(count + cross.size), torch.randn(count)
    mine = {(cross.rank, cross.rank + 1): into}
    most = BUCKET_BYTES["cpu"] // 4
    ends = plan_buckets([count], least=most // MERGED, most=most)

    # The numbers are scaled, else they overflow in the end; a tenth of the time, at most.
    def reduce(exact: bool) -> None:
        Reduction(cross, mine, into, ends, exact=exact).finish()
        into.mul_(1.0 / cross.size)

    def all_reduce() -> None:
        cross.sum(plain)
        plain.mul_(1.0 / cross.size)

    return {
        "exact": lambda: reduce(True),
        "fast": lambda: reduce(False),
        "all_reduce": all_reduce,
    }


def steps(cross: CrossGroup, rendezvous: Rendezvous, options: argparse.Namespace) -> Ways:
    """Part 2: forward and backward of a Llama without and with its reduction."""
    engine = small_engine(cross, rendezvous, options)
    block = engine.gradient
    mine = {(cross.rank, cross.rank + 1): block}
    batch = torch.randint(0, 1000, (1, options.tokens + 1))

    def step(after: bool, overlapping: bool) -> None:
        reduction = Reduction(cross, mine, engine.gradient, engine.layout.buckets, exact=True)
        loss, _ = engine.task.loss(engine.model, batch)
        engine.collect_in(block)
        engine.backward_at_last(loss, reduction.start if overlapping else lambda stop: None)
        if after or overlapping:
            reduction.finish()

    return {
        "step_without": lambda: step(False, False),
        "step_after": lambda: step(True, False),
        "step_overlapping": lambda: step(False, True),
    }


def small_engine(cross: CrossGroup, rendezvous: Rendezvous, options: argparse.Namespace) -> Engine:
    """A Llama of 3.1 M parameters a layer, on one worker."""
    settings = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
    task = PreparedCausalLM(
        config=ModelConfig(settings=settings).resolve(1000),
        seq_len=options.tokens,
        train_path="",
        eval_path="",
        pretrained=None,
        info={},
    )
    train = TrainConfig(task=task, steps=1, global_batch=options.replicas)
    mesh = make_replica_group(
        rendezvous, f"replica/{cross.rank}", rank=0, dims=ParallelDims(), device="cpu"
    )
    slot = Slot(replica=cross.rank, rank=0, dims=ParallelDims())
    engine = Engine(task, train, slot=slot, mesh=mesh, device="cpu", max_replicas=options.replicas)
    engine.initialize()
    if cross.rank == 0:
        count, buckets = engine.layout.count, len(engine.layout.buckets)
        print(
            f"model: {count / 1e6:.1f} M parameters, {buckets} buckets",
            file=sys.stderr,
        )
    return engine


def report(
    options: argparse.Namespace, medians: dict[str, float], times: dict[str, list[float]]
) -> None:
    """A table on stderr, JSON on stdout."""
    for way, turns_s in times.items():
        print(
            f"{way:18} median {medians[way] * 1e3:8.1f} ms   min {min(turns_s) * 1e3:8.1f} ms",
            file=sys.stderr,
        )
    exposed = {
        way: medians[f"step_{way}"] - medians["step_without"] for way in ("after", "overlapping")
    }
    outcome = {
        "exact_vs_fast": medians["exact"] / medians["fast"],
        "exact_vs_in_place_all_reduce": medians["exact"] / medians["all_reduce"],
        "exposed_after_s": exposed["after"],
        "exposed_overlapping_s": exposed["overlapping"],
        **{f"{way}_s": median for way, median in medians.items()},
        "replicas": options.replicas,
        "gradient_mib": options.mib,
        "turns": options.turns,
    }
    print(json.dumps({k: round(v, 4) for k, v in outcome.items()}))


if __name__ == "__main__":
    main()
