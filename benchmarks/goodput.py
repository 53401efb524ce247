"""How much of the work gets done while workers are killed at random: ours and Ray Train's.

    python -m benchmarks.goodput [--minutes 1] [--mtbf 15] [--rounds 3]

Takes about ten minutes. Four workers train the toy model in steps of 0.1 s; ours has a spare. In a
run, after `--free-s` seconds without faults, workers get SIGKILL at random times for `--minutes`,
on average every `--mtbf` seconds. A round is a run of each system, one after the other, with the
same schedule of kills; the next round has another one. Every process of a Ray Train worker may be
hit, even one that is only starting. When its time is over, a run is ended, whatever it is at.

"elastic" and "ray_train" are medians over the rounds of a run's share: steps done under fire /
steps that it would have done in the same time without faults. Steps that are done again after a
restart count once. "faults" are the kills that the schedules of all rounds name; each system gets
all of them. "killed", in the details, are those that found a process.

What a run would have done without faults is told by its own pace before the fire, not by another
run. But for the faults nothing changes while it goes on: steps are paced by time, and saves come
every ten of them from the start. So a longer run without faults keeps that pace, while another one
has other processes, on a machine that others may use more or less by then. `--mtbf 1e9`, where
nobody is killed, puts that to the test: the shares are those of runs without faults, and must be 1.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import end_properly, print_result, say, scratch, show_table
from benchmarks._processes import Processes, processes_below
from benchmarks._toy import read_traces
from elastic.reporting.event_log import read_steps

SYSTEMS = ("elastic", "ray_train")
SETTLING_S = 3.0
"""Not counted at the start."""

BASELINE = "the same run's pace, in the seconds without faults before the first kill can come"

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


def summarise(
    rounds: Sequence[Mapping[str, Mapping[str, float]]], faults: Sequence[int]
) -> dict[str, Any]:
    """The last line.

    Args:
        rounds: what each system did in each round.
        faults: kills in the schedule of each round.
    """
    shares = {name: [found[name]["share"] for found in rounds] for name in SYSTEMS}
    return {
        **{name: round(statistics.median(each), 4) for name, each in shares.items()},
        "faults": sum(faults),
        "baseline": BASELINE,
        "details": [
            {"faults": named, **found} for named, found in zip(faults, rounds, strict=True)
        ],
    }


def worker_processes(ancestor: int) -> list[int]:
    """Process ids of the live workers below a process; both systems run theirs in Ray Train's
    actors, which Ray names in the process's title."""
    return [pid for pid in processes_below(ancestor) if _is_worker(pid)]


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RayTrainWorker")
    return False


def progress_of(system: str, directory: Path) -> Progress:
    """What a run has done so far: ours by its records, Ray Train's by its workers' traces."""
    if system == "ray_train":
        return [(step.time, step.step + 1) for step in read_traces(directory / "traces")]
    return [(r.time, r.step + 1) for r in read_steps(directory / "run" / "steps.jsonl")]


def under_fire(
    system: str,
    directory: Path,
    kills: Sequence[tuple[float, float]],
    options: argparse.Namespace,
) -> dict[str, float]:
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
        killed = kill_at_random(run.pid, kills, begin)
        time.sleep(max(0.0, begin + 60 * options.minutes - time.time()))
        run.terminate()
        run.wait(60)
    return {
        **share_done(progress_of(system, directory), options.free_s, options.minutes),
        "killed": killed,
    }


def one_round(
    kills: Sequence[tuple[float, float]], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """A run of each system, with the same schedule."""
    found = {}
    for system in SYSTEMS:
        with scratch("goodput") as directory:
            found[system] = under_fire(system, directory, kills, options)
        say(f"{system}: {found[system]}")
    return found


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="of random kills in a run (default 1)")
    add("--mtbf", type=float, default=15.0, help="mean seconds between them (default 15)")
    add("--rounds", type=int, default=3, help="runs of each system (default 3)")
    add("--free-s", type=float, default=20.0, help="seconds without faults before (default 20)")
    add("--step-s", type=float, default=0.1, help="length of a step (default 0.1)")
    add("--seed", type=int, default=0, help="of the first schedule, then rising (default 0)")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_arguments()
    end_properly()
    plans = [
        plan_kills(options.minutes, options.mtbf, options.seed + number)
        for number in range(options.rounds)
    ]
    rounds = []
    for number, kills in enumerate(plans):
        say(f"round {number + 1} of {options.rounds}: {len(kills)} kills")
        rounds.append(one_round(kills, options))
    title = f"round {{}}: a worker killed every {options.mtbf:g} s on average"
    for number, found in enumerate(rounds):
        show_table(title.format(number + 1), found)
    print_result(
        {
            **summarise(rounds, [len(kills) for kills in plans]),
            "minutes": options.minutes,
            "mtbf_s": options.mtbf,
            "rounds": options.rounds,
        }
    )


if __name__ == "__main__":
    main()
