"""Random schedules of faults and resizes, each held against the undisturbed run.

    python -m benchmarks.chaos --runs 100 --seed 0
    python -m benchmarks.chaos --runs 1 --seed 17        # the run of seed 17 alone

Every run has a seed of its own, S, S + 1, ...: layout, spares, faults (kills, freezes, exceptions,
in any phase, several at once, in recoveries), machines that come, go and are drained, kills of the
coordinator, the supervisor and node agents, evaluations longer than the timeouts. Where each
replica has a host in a network of its own: links that are down, large packets or those of the store
that are lost, and the loss of the control plane's machine (needs root, `ip`, `ss` and `nft`).

From further random numbers of the seed comes what the trainer is asked for: sharding strategy,
context and tensor degree, collectives in two levels, recomputation, offloading, texts apart,
bfloat16 and 8-bit products, a stand-in for Transformer Engine, the loss in chunks, narrow state,
reading and gathering ahead, a profile of some steps. Tensor groups in two levels need eight
workers: --layouts 1x4x2.

A run is good when it finishes with the weights, losses and samples of an undisturbed run of one
replica that is asked for the same, bit for bit, with equal replicas, and leaves nothing behind;
when it lost just the workers that were hit, each for the right cause; when no fault that had its
chance stayed out; and when it never stood still for longer than the schedule explains. Exit status
1 where one is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._chaos import LAYOUTS, draw_schedule, parse_layouts
from benchmarks._common import end_properly, print_result, say, scratch
from tests.support.te_stand_in import STAND_INS

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the soak. Returns the exit status."""
    options = _options(arguments)
    end_properly()
    _let_workers_import()
    from benchmarks._chaos_machines import Machines
    from benchmarks._chaos_run import Verdict, run_schedule
    from benchmarks._chaos_undisturbed import Undisturbed
    from tests.support.hosts import why_no_hosts
    from tests.support.tiny import write_text

    layouts = parse_layouts(options.layouts)
    seeds = range(options.seed, options.seed + options.runs)
    if options.keep is not None:
        Path(options.keep).mkdir(parents=True, exist_ok=True)
        taken = [seed for seed in seeds if (Path(options.keep) / f"seed-{seed}").exists()]
        if taken:
            raise SystemExit(f"--keep {options.keep} has runs of seeds {taken} already")
    schedules = [
        draw_schedule(seed, layouts, resize=not options.no_resize, plain=options.plain)
        for seed in seeds
    ]
    drawn = [options.layouts, "plain" if options.plain else "featured"]
    why_not = why_no_hosts(lossy=True)
    if why_not is not None and any(schedule.hosts for schedule in schedules):
        raise SystemExit(f"some of these runs need hosts (--no-resize draws none): {why_not}")
    verdicts: dict[int, Verdict] = {}
    with scratch("chaos") as directory:
        text, machines = write_text(directory / "text"), Machines()
        undisturbed = Undisturbed(text, directory / "tokens")
        try:
            for seed, schedule in zip(seeds, schedules, strict=True):
                say(str(schedule))
                whole = undisturbed.of(schedule)
                verdict = run_schedule(schedule, drawn, text, directory, machines, whole)
                verdicts[seed] = verdict
                say(_line(seed, verdict))
                records = directory / schedule.name
                if options.keep is not None and records.exists():  # not where it did not start
                    shutil.move(records, options.keep)
        finally:
            machines.close()
    runs = list(verdicts.values())
    print_result(
        {
            "runs": len(runs),
            "finished": sum(run.error is None for run in runs),
            "bitwise_equal": sum(run.bitwise_equal for run in runs),
            "ledger_exact": sum(run.ledger_exact for run in runs),
            "faults_fired": sum(run.faults_fired for run in runs),
            "faults_unfired": sum(run.faults_unfired for run in runs),
            "actions_done": sum(run.actions_done for run in runs),
            "left_behind": sum(len(run.left_behind) for run in runs),
            "complaints": sum(len(run.complaints) for run in runs),
            "seeds_not_good": [seed for seed, run in verdicts.items() if not run.good],
            "median_run_s": round(sorted(run.wall_s for run in runs)[len(runs) // 2], 1),
        }
    )
    return 0 if all(run.good for run in runs) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (default 0)")
    parser.add_argument(
        "--layouts",
        default="",
        help="replicas x shard x tensor [x context], with commas (default "
        f"{','.join(map(str, LAYOUTS))}, and, unless --plain, the workers of a replica laid out "
        "anew, up to four of them)",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="nothing is asked of the trainer: a seed's run as it was drawn before there were "
        "features. Its faults and actions are the same without, but for ranks in replicas that "
        "are laid out with more workers",
    )
    parser.add_argument(
        "--no-resize",
        action="store_true",
        help="machines neither come nor go, and no network fails",
    )
    parser.add_argument("--keep", help="directory for the runs' records and checkpoints")
    return parser.parse_args(arguments)


def _line(seed: int, verdict: Any) -> str:
    facts = [f"{verdict.faults_fired} faults, {verdict.actions_done} actions"]
    facts += [] if verdict.error is None else [verdict.error]
    facts += [] if verdict.ledger_exact else ["LEDGER"]
    facts += [] if verdict.bitwise_equal else ["BITS DIFFER"]
    facts += [*verdict.complaints, *(f"left behind: {thing}" for thing in verdict.left_behind)]
    word = "good" if verdict.good else "NOT GOOD"
    return f"seed {seed}: {word} after {verdict.wall_s:.1f} s; {'; '.join(facts)}"


def _let_workers_import() -> None:
    """The tiny run and the stand-ins belong to the tests: Ray's processes inherit the environment,
    those of undisturbed runs the path."""
    paths = [str(ROOT), STAND_INS]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    sys.path.append(STAND_INS)


if __name__ == "__main__":
    sys.exit(main())
