"""What fault tolerance costs in a step without faults: a run of ours against plain FSDP2.

    python -m benchmarks.overhead [--shard 2] [--rounds 3]

Takes about five minutes. Two replicas on Gloo, each `--shard` workers of one thread:

    plain   an ordinary loop: fully_shard on a replicate x shard mesh, fused AdamW, clip_grad_norm_
    fast    ElasticTrainer on a Ray cluster of its own, reduction="fast" (a plain all-reduce)
    exact   the same with reduction="exact" (the fixed tree over lanes)

Ours is the product whole, with its defaults: in the workers the heartbeat, the watch, step records
and the thread that sends them, the clock of the saves, fault points, and the comparison of the
replicas every `compare_every` steps; beside them the coordinator, node agent, uploader, Ray Train's
controller, the driver, and Ray itself. The plain loop is its workers and nothing else. Neither
saves: `benchmarks.checkpoint` measures that.

All have the same model, weights and micro-batches, which is checked by their losses in the first
round; later on rounding tells them apart. They take turns, a block of steps each. Between its
turns all of a system is stopped, so that it burdens nobody else, and what else the machine does
meets all alike. A round is `compare_every` steps of each, so it has one comparison. A ratio is the
median over the rounds of (a round's steps of ours) / (those of plain in the same round).

Two figures sum that up. "ratio" is of wall time, of the worse one of the two reductions; how far to
trust it, "wall_spread" tells: half of the plain loop's blocks lie that close together.
"beside_share" is what our processes beside the workers use of one core, each less what a Ray actor
uses that does nothing, also of the worse one; "beside" has each. They go by time, not by steps, and
hardly grow with the workers.

In "systems", "cpu_ms" is the CPU time of all processes for a step; "beside_cpu_ms" is the part of
it that is not the workers', Ray's included. On a machine that has no cores but the workers' it is
taken from the steps. On a busy one, a step takes longer and has more of it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import (
    end_properly,
    median_of,
    print_result,
    say,
    scratch,
    show_table,
)
from benchmarks._turn_loops import IdleActor, run_elastic, run_workers, train_fsdp2
from benchmarks._turn_task import add_model_arguments, make_task
from benchmarks._turns import Block, GatedLM, Turns, take_rounds
from elastic import HealthConfig
from elastic.protocol import events
from elastic.reporting.event_log import read_events

REPLICAS = 2
OURS = ("fast", "exact")
SYSTEMS = ("plain", *OURS)
OUR_PROCESSES = ("Supervisor", "Coordinator", "NodeAgent", "Uploader", "driver")
ROUND_STEPS = HealthConfig().compare_every or 100
"""So each round has one comparison of the replicas."""


def make_systems(directory: Path, options: argparse.Namespace) -> dict[str, Turns]:
    """The systems, not yet started."""
    workers = REPLICAS * options.shard
    batch = workers * options.samples
    task, train = make_task(
        directory, options, global_batch=batch, replicas=REPLICAS, shard=options.shard
    )
    say(f"{task.info['parameters']:,} parameters, {REPLICAS} x {options.shard} workers each")
    context = multiprocessing.get_context("spawn")
    systems = {}
    for name in SYSTEMS:
        (own := directory / name).mkdir()
        gated = GatedLM(**vars(task), address=str(own / "gate"))
        process = (
            context.Process(target=run_workers, args=(own, train_fsdp2, gated, train, REPLICAS))
            if name == "plain"
            else context.Process(target=run_elastic, args=(own, gated, train, REPLICAS, name))
        )
        systems[name] = Turns(gated.address, process, workers)
    return systems


def measure(options: argparse.Namespace) -> list[dict[str, list[Block]]]:
    """Every system's blocks, round by round."""
    with scratch("overhead") as directory, contextlib.ExitStack() as running:
        systems = make_systems(directory, options)
        rounds = take_rounds(
            running,
            systems,
            ratios,
            rounds=options.rounds,
            turns=ROUND_STEPS // options.block,
            steps=options.block,
        )
        for name in OURS:
            check_quiet(directory / name / "run", options.rounds)
        return rounds


def check_quiet(run: Path, rounds: int) -> None:
    """Nothing happened to a run of ours, and it did what it does from time to time."""
    happened = read_events(run / "events.jsonl")
    rosters = [e for e in happened if isinstance(e, events.RegroupDone)]
    compared = [e for e in happened if isinstance(e, events.ReplicasCompared)]
    assert [r.replicas for r in rosters] == [REPLICAS], f"not a run without faults: {rosters}"
    assert len(compared) >= rounds, f"compared {len(compared)} times in {rounds} rounds"


def ratios(found: Mapping[str, Sequence[Block]]) -> dict[str, dict[str, float]]:
    """One round: milliseconds of a step of each system, and ratios to the plain loop's."""
    ms = {name: _ms_a_step(blocks) for name, blocks in found.items()}
    return {
        name: {
            **own,
            "wall_ratio": own["wall_ms"] / ms["plain"]["wall_ms"],
            "cpu_ratio": own["cpu_ms"] / ms["plain"]["cpu_ms"],
        }
        for name, own in ms.items()
    }


def _ms_a_step(blocks: Sequence[Block]) -> dict[str, float]:
    beside_s = sum(block.beside_cpu_s for block in blocks)
    cpu_s = sum(block.workers_cpu_s for block in blocks) + beside_s
    sums_s = {"wall_ms": sum(b.wall_s for b in blocks), "cpu_ms": cpu_s, "beside_cpu_ms": beside_s}
    return {name: 1e3 * sum_s / ROUND_STEPS for name, sum_s in sums_s.items()}


def summarise(rounds: list[dict[str, list[Block]]]) -> dict[str, Any]:
    """Medians over the rounds, and what to go by."""
    each = [ratios(found) for found in rounds]
    systems = {name: median_of([found[name] for found in each]) for name in SYSTEMS}
    plain_s = [block.wall_s for found in rounds for block in found["plain"]]
    low, middle, high = statistics.quantiles(plain_s, n=4)
    beside = {name: shares([b for found in rounds for b in found[name]]) for name in OURS}
    return {
        "ratio": max(systems[name]["wall_ratio"] for name in OURS),
        "wall_spread": round((high - low) / middle, 4),
        "beside_share": round(max(map(apart_from_ray, beside.values())), 4),
        "beside": beside,
        "systems": systems,
    }


def apart_from_ray(beside: dict[str, float]) -> float:
    """What our processes use together, each less what an actor uses that does nothing."""
    nothing = beside.get(IdleActor.__name__, 0.0)
    return sum(max(0.0, beside.get(name, 0.0) - nothing) for name in OUR_PROCESSES)


def shares(blocks: list[Block]) -> dict[str, float]:
    """What each actor beside the workers, Ray's too, and the driver uses of one core."""
    names = sorted({name for block in blocks for name in block.actors_cpu_s})
    awake_s = sum(block.awake_s for block in blocks)
    spent_s = {name: sum(block.actors_cpu_s.get(name, 0.0) for block in blocks) for name in names}
    return {name: round(seconds / awake_s, 4) for name, seconds in spent_s.items()}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shard", type=int, default=1, help="processes in a replica (default 1)")
    add("--rounds", type=int, default=3, help=f"of {ROUND_STEPS} steps of each (default 3)")
    add("--block", type=int, default=10, help="steps in a turn (default 10)")
    add_model_arguments(parser)
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
