"""How much of the work gets done while workers are killed at random: ours and Ray Train's.

    python -m benchmarks.goodput [--minutes 1.5] [--mtbf 15]

Takes about six minutes. Four workers train the toy model in steps of 0.1 s; ours has a spare. After
half a minute without faults, workers get SIGKILL at random times for `--minutes`, on average every
`--mtbf` seconds: the same schedule for both. Every Ray Train worker's process may be hit, also one
that is only starting. A kill that finds none is not counted in "killed".

"elastic" and "ray_train" are shares: steps done in that time / steps that the same run would have
done at its pace before the first kill. Steps that are done again after a restart count once.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks._common import end_properly, print_result, ray_cluster, say, scratch, show_table
from benchmarks._runs import Meanwhile, run_elastic, run_ray_train
from benchmarks._toy import read_traces

WORKERS, SPARES = 4, 1
SETTLING_S = 3.0
"""Not counted at the start."""

Progress = list[tuple[float, int]]
"""(time, steps done), in order of time."""


def plan_kills(minutes: float, mtbf_s: float, seed: int) -> list[tuple[float, float]]:
    """(seconds into the time under fire, which live worker: a number in [0, 1)) for each kill."""
    rng, kills, at_s = random.Random(seed), [], 0.0
    while (at_s := at_s + rng.expovariate(1 / mtbf_s)) < 60 * minutes:
        kills.append((at_s, rng.random()))
    return kills


def kill_at_random(
    progress: Callable[[], Progress],
    kills: Sequence[tuple[float, float]],
    free_s: float,
) -> int:
    """Carries out the plan on a run. Returns how many processes were killed."""
    while not (seen := progress()):
        time.sleep(0.1)
    begin, killed = seen[0][0] + SETTLING_S + free_s, 0
    for at_s, which in kills:
        time.sleep(max(0.0, begin + at_s - time.time()))
        pids = worker_processes()
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(pids[int(which * len(pids))], signal.SIGKILL)
            killed += 1
    return killed


def share_done(progress: Progress, free_s: float, minutes: float) -> dict[str, float]:
    """The share of steps done under fire, and the pace before it."""
    free = progress[0][0] + SETTLING_S
    begin, end = free + free_s, free + free_s + 60 * minutes

    def done(at: float) -> int:
        return max((steps for when, steps in progress if when <= at), default=0)

    per_s = (done(begin) - done(free)) / free_s
    share = (done(end) - done(begin)) / (per_s * 60 * minutes)
    return {"share": round(share, 4), "steps_per_s_before": round(per_s, 3)}


def worker_processes() -> list[int]:
    """Process ids of the live workers; both systems run theirs in Ray Train's actors."""
    actors = ray._private.state.actors().values()
    return sorted(
        row["Pid"]
        for row in actors
        if row["ActorClassName"] == "RayTrainWorker" and row["State"] == "ALIVE"
    )


def elastic(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Our run under fire."""
    from elastic.event_log import read_steps

    run = directory / "run"

    def progress() -> Progress:
        path = run / "steps.jsonl"
        return [(r.time, r.step + 1) for r in read_steps(path)] if path.exists() else []

    return _under_fire(
        options,
        progress,
        lambda: run_elastic(
            directory,
            workers=WORKERS,
            spares=SPARES,
            steps=_steps(options),
            step_s=options.step_s,
        ),
    )


def ray_train(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Ray Train's run under fire."""
    (traces := directory / "traces").mkdir()

    return _under_fire(
        options,
        lambda: [(step.time, step.step + 1) for step in read_traces(traces)],
        lambda: run_ray_train(
            directory,
            workers=WORKERS,
            steps=_steps(options),
            step_s=options.step_s,
            max_failures=-1,
        ),
    )


def _under_fire(
    options: argparse.Namespace,
    progress: Callable[[], Progress],
    run: Callable[[], Any],
) -> dict[str, float]:
    kills = plan_kills(options.minutes, options.mtbf, options.seed)
    with Meanwhile(lambda: kill_at_random(progress, kills, options.free_s)) as killer:
        run()
    found = share_done(progress(), options.free_s, options.minutes)
    return {**found, "killed": killer.result}


def _steps(options: argparse.Namespace) -> int:
    """No run can be through before the last kill."""
    return math.ceil((SETTLING_S + options.free_s + 60 * options.minutes) / options.step_s)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.5, help="of random kills (default 1.5)")
    add("--mtbf", type=float, default=15.0, help="mean seconds between them (default 15)")
    add("--free-s", type=float, default=27.0, help="seconds without faults before (default 27)")
    add("--step-s", type=float, default=0.1, help="length of a step (default 0.1)")
    add("--seed", type=int, default=0, help="of the schedule (default 0)")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_arguments()
    end_properly()
    found: dict[str, dict[str, float]] = {}
    with contextlib.redirect_stdout(sys.stderr), ray_cluster(WORKERS + SPARES):
        for name, measure in (("elastic", elastic), ("ray_train", ray_train)):
            with scratch("goodput") as directory:
                found[name] = measure(directory, options)
            say(f"{name}: {found[name]}")
    show_table(f"a worker killed every {options.mtbf:g} s on average", found)
    print_result(
        {
            "elastic": found["elastic"]["share"],
            "ray_train": found["ray_train"]["share"],
            "faults": len(plan_kills(options.minutes, options.mtbf, options.seed)),
            "minutes": options.minutes,
            "mtbf_s": options.mtbf,
            "details": found,
        }
    )


if __name__ == "__main__":
    main()
