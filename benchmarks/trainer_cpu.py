"""The trainer's own loop against plain loops of the same model, on the CPU, without Ray and faults.

    python -m benchmarks.trainer_cpu [--samples 32] [--rounds 5]

Takes about five minutes. Two pairs; each worker is a process of one thread:

    single process     forward, backward, clip_grad_norm_, fused AdamW, on a plain module
    ours, one worker   the trainer's engine and loop, one replica of one worker

    FSDP2              the same plain loop on two workers, its blocks and itself in fully_shard
    ours, shard 2      one replica of two workers

All have the same model, weights and batch, which is checked by their losses in the first round.
They take turns, a block of steps each; those whose turn it is not are stopped. A ratio is of tokens
a second, ours by the plain loop's: of a round, and then the median over the rounds. "spread" is how
far apart the middle half of the plain loop's blocks lie, of their median: a ratio is no surer than
that. "cpu_ratio" is the same of CPU seconds, which other processes disturb less.

What a step costs whatever it computes weighs more where it has fewer tokens: see `--samples`.

Of ours this is what a step is made of: reading ahead, lanes, flat gradients, the digest of each
lane, the commit, the clock. Left out is what a run has beside and between the steps: heartbeat,
records, watch, saves, comparisons and sums with other replicas, the control plane and Ray.
`benchmarks.overhead` has them all.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._common import end_properly, median_of, print_result, scratch, show_table
from benchmarks._turn_loops import (
    TrainWorker,
    run_workers,
    train_alone,
    train_fsdp2,
    train_ours,
)
from benchmarks._turn_task import HEADS, add_model_arguments, make_task
from benchmarks._turns import Block, GatedLM, Turns, take_rounds
from trainer.config import ParallelConfig

SHARD = 2
SYSTEMS: dict[str, tuple[TrainWorker, int]] = {
    "single process": (train_alone, 1),
    "ours, one worker": (train_ours, 1),
    "FSDP2": (train_fsdp2, SHARD),
    "ours, shard 2": (train_ours, SHARD),
}
"""Name -> a worker's loop, and how many workers."""
PAIRS = {
    "vs_single_process": ("ours, one worker", "single process"),
    "vs_fsdp2": ("ours, shard 2", "FSDP2"),
}
"""Ratio -> what is held against what."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result."""
    with scratch("trainer_cpu") as directory, contextlib.ExitStack() as running:
        task, train = make_task(
            directory, options, global_batch=options.samples, replicas=1, shard=1
        )
        systems = {
            name: make_system(directory / name.replace(" ", "_"), name, task, train)
            for name in SYSTEMS
        }
        rounds = take_rounds(
            running,
            systems,
            ratios,
            rounds=options.rounds,
            turns=options.turns,
            steps=options.block,
        )
    sizes = {
        "parameters": task.info["parameters"],
        "hidden": options.hidden,
        "layers": options.layers,
        "seq_len": options.seq_len,
        "samples": options.samples,
        "tokens_per_step": options.samples * options.seq_len,
        "steps": options.rounds * options.turns * options.block,
    }
    return {**summarise(rounds, sizes["tokens_per_step"], options.block), **sizes}


def make_system(own: Path, name: str, task: Any, train: Any) -> Turns:
    """A system, not yet started."""
    own.mkdir()
    loop, workers = SYSTEMS[name]
    gated = GatedLM(**vars(task), address=str(own / "gate"))
    settings = replace(train, parallel=ParallelConfig(shard=workers))
    process = multiprocessing.get_context("spawn").Process(
        target=run_workers, args=(own, loop, gated, settings, 1)
    )
    return Turns(gated.address, process, workers)


def ratios(found: Mapping[str, Sequence[Block]]) -> dict[str, dict[str, float]]:
    """Of one round: how much faster ours is than the plain loop of its pair, and how much less CPU
    time it takes; above 1 it is better."""
    wall_s = {name: sum(block.wall_s for block in blocks) for name, blocks in found.items()}
    cpu_s = {name: sum(block.workers_cpu_s for block in blocks) for name, blocks in found.items()}
    return {
        pair: {"ratio": wall_s[plain] / wall_s[ours], "cpu_ratio": cpu_s[plain] / cpu_s[ours]}
        for pair, (ours, plain) in PAIRS.items()
    }


def summarise(
    rounds: Sequence[Mapping[str, Sequence[Block]]], tokens: int, steps: int
) -> dict[str, Any]:
    """Medians over the rounds.

    Args:
        rounds: the blocks of each system, by round.
        tokens: of a step.
        steps: of a block.
    """
    each = [ratios(found) for found in rounds]
    pairs = {pair: median_of([found[pair] for found in each]) for pair in PAIRS}
    blocks = {name: [block for found in rounds for block in found[name]] for name in SYSTEMS}
    step_s = {
        name: statistics.median(block.wall_s for block in own) / steps
        for name, own in blocks.items()
    }
    return {
        **{pair: found["ratio"] for pair, found in pairs.items()},
        "cpu_ratio": {pair: found["cpu_ratio"] for pair, found in pairs.items()},
        "spread": {pair: spread(blocks[plain]) for pair, (_, plain) in PAIRS.items()},
        "systems": {
            name: {"step_ms": round(1e3 * each_s, 2), "tokens_per_s": round(tokens / each_s, 1)}
            for name, each_s in step_s.items()
        },
    }


def spread(blocks: Sequence[Block]) -> float:
    """How far apart the middle half lies, of the median."""
    low, middle, high = statistics.quantiles([block.wall_s for block in blocks], n=4)
    return round((high - low) / middle, 4)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or `arguments`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="(default 5)")
    add("--turns", type=int, default=3, help="of each system in a round (default 3)")
    add("--block", type=int, default=4, help="steps in a turn (default 4)")
    add_model_arguments(parser)
    add("--samples", type=int, default=32, help="samples in a step (default 32)")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.turns, options.block, options.layers, options.seq_len) < 1:
        parser.error("--rounds, --turns, --block, --layers and --seq-len: use 1 or more")
    if options.rounds * options.turns < 2:
        parser.error("one turn has no spread; use 2 turns or more")
    if options.samples < SHARD or options.samples % SHARD:
        parser.error(f"{SHARD} workers share {options.samples} samples; use a multiple of {SHARD}")
    if options.hidden < 2 * HEADS or options.hidden % (2 * HEADS):
        parser.error(
            f"{HEADS} heads of even size do not make {options.hidden}; "
            f"use a --hidden that is a multiple of {2 * HEADS}"
        )
    return options


def main() -> None:
    """Runs the benchmark."""
    options = parse_arguments()
    end_properly()
    result = measure(options)
    show_table("tokens a second", result["systems"])
    print_result(result)


if __name__ == "__main__":
    main()
