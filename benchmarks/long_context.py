"""One long sequence on several workers: how much memory its activations take on each, by context
and by tensor (and sequence) parallelism.

A small Llama takes a step on the CPU, through the trainer's own loop, one process for each worker;
its batch is one sequence of random tokens, 32,768 unless said otherwise. The peak of the step is
read off the allocator's events: all that is not parameters, gradients and moments. Beside it stand
what a dry run foretells, the seconds of the step, and its loss and gradient norm, which are the
same in all layouts but for the order of sums. The workers share this machine's processors, so the
seconds say nothing of speed on several machines.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from benchmarks._common import print_result, say, show_table
from benchmarks._random_text import prepared
from tests.support.measured_peak import make_loop, peak_of, take_step
from tests.support.small_llama import small_train
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.dryrun.rank import dry_run

LAYOUTS = {
    "one worker": ParallelConfig(),
    "context 2": ParallelConfig(context=2),
    "context 4": ParallelConfig(context=4),
    "tensor 2": ParallelConfig(tensor=2),
    "tensor 4": ParallelConfig(tensor=4),
    "context 2, tensor 2": ParallelConfig(context=2, tensor=2),
}
SETTINGS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
_STATE = ("parameters", "gradients", "optimizer")
"""Components of a dry run that are no activations."""


def main() -> None:
    """Runs the benchmark; the last line on stdout is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_context", description=__doc__)
    parser.add_argument("--seq-len", type=int, default=32768, help="tokens (32768)")
    seq_len = parser.parse_args().seq_len
    rows = {}
    for name, parallel in LAYOUTS.items():
        rows[name] = measure(settings(seq_len, parallel))
        say(f"{name}: {rows[name]}")
    whole = rows["one worker"]["activations_mb"]
    for row in rows.values():
        row["of_one"] = round(row["activations_mb"] / whole, 3)
    show_table(f"{seq_len} tokens", rows)
    print_result({"seq_len": seq_len, "layouts": rows})


def settings(seq_len: int, parallel: ParallelConfig) -> TrainConfig:
    """Of one run."""
    train = small_train(steps=1, global_batch=1, optimizer=OptimizerConfig(lr=1e-2))
    model = replace(train.task.model, settings={**SETTINGS, "max_position_embeddings": seq_len})
    chunk = min(1024, seq_len // 8)
    task = replace(train.task, model=model, seq_len=seq_len, loss_chunk=chunk)
    return replace(train, task=task, parallel=parallel)


def measure(train: TrainConfig) -> dict[str, Any]:
    """Numbers of one layout: the worker with the most memory, the slowest one."""
    train.check(1)
    foretold = dry_run(train, replicas=1, device="cpu").components
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        workers = train.parallel.workers
        mp.start_processes(
            _worker, args=(store.port, train, results), nprocs=workers, start_method="spawn"
        )
        peaks, seconds, commits = zip(*(results[place] for place in range(workers)), strict=True)
    return {
        "activations_mb": round(max(peaks) / 1e6, 1),
        "foretold_mb": round(sum(n for c, n in foretold.items() if c not in _STATE) / 1e6, 1),
        "step_s": round(max(seconds), 1),
        "loss": round(commits[0].loss, 5),
        "grad_norm": round(commits[0].grad_norm, 5),
    }


def _worker(place: int, port: int, train: TrainConfig, results: Any) -> None:
    torch.set_num_threads(1)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=3600)
    loop = make_loop(place, meet, prepared(train), train, 1)
    begun_s = time.monotonic()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        commit = take_step(loop)
    seconds = time.monotonic() - begun_s
    assert loop.loader is not None
    loop.loader.close()
    results[place] = peak_of(seen), seconds, commit
    del loop
    leave_replica_group()


if __name__ == "__main__":
    main()
