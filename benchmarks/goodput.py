"""How much of the work gets done while workers are killed at random: ours and Ray Train's.

    python -m benchmarks.goodput [--minutes 1.5] [--mtbf 15]

Takes about five minutes. Four workers train the toy model in steps of 0.1 s; ours has a spare.
After half a minute without faults, workers get SIGKILL at random times for `--minutes`, on average
every `--mtbf` seconds: the same schedule for both. Every process of a Ray Train worker may be hit,
even one that is only starting. A kill that finds none is not counted in "killed". When the time is
over, the run is ended, whatever it is at.

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
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._common import end_properly, print_result, say, scratch, show_table
from benchmarks._processes import Processes
from benchmarks._toy import read_traces
from elastic.event_log import read_steps

SYSTEMS = ("elastic", "ray_train")
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


def kill_at_random(run: int, kills: Sequence[tuple[float, float]], begin: float) -> int:
    """Carries out the plan on the run of process `run`, from `begin` on.

    Returns:
        How many processes were killed.
    """
    killed = 0
    for at_s, which in kills:
        time.sleep(max(0.0, begin + at_s - time.time()))
        pids = worker_processes(run)
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


def worker_processes(ancestor: int) -> list[int]:
    """Process ids of the live workers below a process; both systems run theirs in Ray Train's
    actors, which Ray names in the process's title."""
    parents, workers = {}, []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pid, status = int(place.name), (place / "stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(status[1])
            if (place / "cmdline").read_bytes().startswith(b"ray::RayTrainWorker"):
                workers.append(pid)
    return sorted(pid for pid in workers if _is_below(pid, ancestor, parents))


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def progress_of(system: str, directory: Path) -> Progress:
    """What a run has done so far: ours by its records, Ray Train's by its workers' traces."""
    if system == "ray_train":
        return [(step.time, step.step + 1) for step in read_traces(directory / "traces")]
    path = directory / "run" / "steps.jsonl"
    return [(r.time, r.step + 1) for r in read_steps(path)] if path.exists() else []


def under_fire(system: str, directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Runs a system, and kills its workers."""
    (directory / "traces").mkdir()
    steps = math.ceil((SETTLING_S + options.free_s + 60 * options.minutes) / options.step_s)
    with Processes(directory / "log") as processes:
        run = processes.start(
            *("-m", "benchmarks._goodput_run", system, str(directory)),
            *(str(steps), str(options.step_s)),
        )
        while not (seen := progress_of(system, directory)):
            if run.poll() is not None:
                raise RuntimeError(f"{system}: {(directory / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        begin = seen[0][0] + SETTLING_S + options.free_s
        killed = kill_at_random(run.pid, plan(options), begin)
        time.sleep(max(0.0, begin + 60 * options.minutes - time.time()))
        run.terminate()
        run.wait(60)
    return {
        **share_done(progress_of(system, directory), options.free_s, options.minutes),
        "killed": killed,
    }


def plan(options: argparse.Namespace) -> list[tuple[float, float]]:
    """The kills of both systems."""
    return plan_kills(options.minutes, options.mtbf, options.seed)


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
    for system in SYSTEMS:
        with scratch("goodput") as directory:
            found[system] = under_fire(system, directory, options)
        say(f"{system}: {found[system]}")
    show_table(f"a worker killed every {options.mtbf:g} s on average", found)
    print_result(
        {
            "elastic": found["elastic"]["share"],
            "ray_train": found["ray_train"]["share"],
            "faults": len(plan(options)),
            "minutes": options.minutes,
            "mtbf_s": options.mtbf,
            "details": found,
        }
    )


if __name__ == "__main__":
    main()
