"""One of four workers is killed: how long the others stand still, and when all four work again.

    python -m benchmarks.recovery [--systems elastic torchft ...] [--repeats 3]

Takes about ten minutes on two cores. All systems train the same toy model on Gloo in steps of 0.1 s
(a step is paced by time); the worker with rank 2 gets SIGKILL from outside after step 44.

    elastic           ElasticTrainer with a spare
    elastic_no_spare  ElasticTrainer: three go on, the replacement joins them
    ray_train         Ray Train's TorchTrainer, DDP, max_failures, a checkpoint every 10 steps
    torchrun          torchrun --standalone --max-restarts, DDP, a checkpoint every 10 steps
    torchft           torchft 0.2.0, four replica groups; a launcher restarts the killed one at once

stall_s     longest time between two committed steps of a survivor, less the length of a step
rejoin_s    from the kill to the first step that is committed by four workers again
lost_steps  committed steps that had to be done again
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._common import (
    end_properly,
    median_of,
    print_result,
    ray_cluster,
    say,
    scratch,
    show_table,
)
from benchmarks._processes import Processes, free_port
from benchmarks._runs import Meanwhile, run_elastic, run_ray_train
from benchmarks._torchft import find_torchft
from benchmarks._toy import Step, read_traces

WORKERS, VICTIM, KILL_STEP = 4, 2, 45
AFTERMATH_S = 2.0
"""The stall is looked for until so long after the rejoin."""
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """A run: what was committed when, and what was done to it."""

    killed: float
    """Time of the kill."""
    steps: list[Step]
    """Committed steps of one survivor."""
    rejoined: float
    """Time of the first step with all workers again."""
    lost_steps: int
    """Committed steps that were done again."""

    def numbers(self, step_s: float) -> dict[str, float]:
        """What the benchmark reports."""
        times = [s.time for s in self.steps if s.time < self.rejoined + AFTERMATH_S]
        gaps = [b - a for a, b in pairwise(times) if b > self.killed]
        return {
            "stall_s": max(gaps) - step_s,
            "rejoin_s": self.rejoined - self.killed,
            "lost_steps": self.lost_steps,
        }


def wait_for(what: Callable[[], Any], why: str, timeout_s: float = PATIENCE_S) -> Any:
    """Polls until `what` gives something.

    Raises:
        TimeoutError: it did not in time.
    """
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"no {why} in {timeout_s:g} s")


# -- the peers, whose workers write traces --------------------------------------------------------


def kill_by_trace(traces: Path) -> float:
    """Kills the victim once it has done KILL_STEP steps. Returns when."""

    def victim() -> int | None:
        done = [s for s in read_traces(traces) if s.rank == VICTIM and s.step >= KILL_STEP - 1]
        return done[0].pid if done else None

    pid = wait_for(victim, f"step {KILL_STEP}")
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed


def rejoined_by_trace(traces: Path, killed: float) -> float | None:
    """The first time after the kill that the victim's successor has done a step in a group of four;
    None before that."""
    steps = read_traces(traces)
    before = {step.pid for step in steps if step.rank == VICTIM and step.time <= killed}
    return next(
        (
            step.time
            for step in steps
            if step.rank == VICTIM and step.pid not in before and step.members == WORKERS
        ),
        None,
    )


def outcome_of_traces(traces: Path, killed: float) -> Outcome:
    """The outcome as rank 0, a survivor, saw it."""
    rejoined = rejoined_by_trace(traces, killed)
    assert rejoined is not None
    mine = [step for step in read_traces(traces) if step.rank == 0]
    again = len(mine) - len({step.step for step in mine})
    return Outcome(killed=killed, steps=mine, rejoined=rejoined, lost_steps=again)


def watch_traces(traces: Path, meanwhile: Callable[[], None] = lambda: None) -> Outcome:
    """Kills the victim and waits until all is well again and a little longer."""
    killed = kill_by_trace(traces)

    def rejoined() -> float | None:
        meanwhile()
        return rejoined_by_trace(traces, killed)

    wait_for(rejoined, "rejoin")
    time.sleep(AFTERMATH_S)
    return outcome_of_traces(traces, killed)


def torchrun(directory: Path, options: argparse.Namespace) -> Outcome:
    """Stock torchrun: all workers are restarted from the last checkpoint.

    Without the variable, and with a static rendezvous in any case, torch 2.13 does not come up
    again: the workers find the last attempt's addresses in the agent's store (pytorch #135712).
    """
    (traces := directory / "traces").mkdir()
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Processes(directory / "log", variables=own_store) as processes:
        processes.start(
            *("-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={WORKERS}"),
            *("--standalone", "--max-restarts=3", "-m", "benchmarks._ddp_peer"),
            *(str(traces), str(directory), "1000000", str(options.step_s)),
        )
        try:
            return watch_traces(traces)
        finally:
            end_workers(traces)


def end_workers(traces: Path) -> None:
    """torchrun's workers have sessions of their own; the agent would restart them once more."""
    for pid in {step.pid for step in read_traces(traces)}:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if b"_ddp_peer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def torchft(directory: Path, options: argparse.Namespace) -> Outcome:
    """torchft: survivors go on, a restarted worker heals from one of them.

    With the join timeout of its README, 10 s, survivors wait for the dead one's heartbeat to run
    out, 5 s, which would flatter us; with the 0.1 s of its own tests, they leave each other behind.
    """
    (traces := directory / "traces").mkdir()
    place = find_torchft()
    lighthouse = free_port()
    address = f"http://127.0.0.1:{lighthouse}"
    with Processes(
        directory / "log", path=[place], variables={"TORCHFT_LIGHTHOUSE": address}
    ) as processes:
        processes.start(
            *(str(place / "bin/torchft_lighthouse"), "--min_replicas", "1"),
            *("--quorum_tick_ms", "100", "--join_timeout_ms", "1000"),
            *("--bind", f"[::]:{lighthouse}"),
        )

        def start(rank: int) -> Any:
            arguments = (str(traces), str(rank), str(options.step_s))
            return processes.start("-m", "benchmarks._torchft_peer", *arguments)

        workers = [start(rank) for rank in range(WORKERS)]

        def restart() -> None:
            for rank, worker in enumerate(workers):
                if worker.poll() is not None:
                    workers[rank] = start(rank)

        return watch_traces(traces, restart)


def ray_train(directory: Path, options: argparse.Namespace) -> Outcome:
    """Stock Ray Train: the whole group is restarted from the last checkpoint."""
    (traces := directory / "traces").mkdir()
    with Meanwhile(lambda: kill_by_trace(traces)) as killer:
        run_ray_train(
            directory,
            workers=WORKERS,
            steps=options.steps,
            step_s=options.step_s,
            max_failures=3,
        )
    return outcome_of_traces(traces, killer.result)


# -- ours ------------------------------------------------------------------------------------------


def elastic(directory: Path, options: argparse.Namespace, spares: int = 1) -> Outcome:
    """ElasticTrainer with a spare."""
    with Meanwhile(lambda: kill_by_records(directory / "run")) as killer:
        run_elastic(
            directory, workers=WORKERS, spares=spares, steps=options.steps, step_s=options.step_s
        )
    return outcome_of_records(directory / "run", killer.result)


def elastic_no_spare(directory: Path, options: argparse.Namespace) -> Outcome:
    """ElasticTrainer without a spare."""
    return elastic(directory, options, spares=0)


def kill_by_records(run: Path) -> float:
    """Kills the worker of rank 2 once KILL_STEP steps are committed. Returns when."""
    from elastic.protocol.events import WorkerJoined
    from elastic.reporting.event_log import read_events, read_steps

    def begun() -> bool:
        steps = read_steps(run / "steps.jsonl") if (run / "steps.jsonl").exists() else []
        return bool(steps) and steps[-1].step >= KILL_STEP - 1

    wait_for(begun, f"step {KILL_STEP}")
    joined = [e for e in read_events(run / "events.jsonl") if isinstance(e, WorkerJoined)]
    (pid,) = [e.pid for e in joined if e.worker.startswith(f"w{VICTIM}-")]
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed


def outcome_of_records(run: Path, killed: float) -> Outcome:
    """The outcome in the run's own records: steps as the lead worker, a survivor, saw them."""
    from elastic.protocol.events import RegroupDone, WorkerLost
    from elastic.reporting.event_log import read_events, read_steps

    happened = read_events(run / "events.jsonl")
    lost = [e for e in happened if isinstance(e, WorkerLost)]
    assert len(lost) == 1, f"one worker was killed, these were lost: {lost}"
    later = {e.generation for e in happened if isinstance(e, RegroupDone) and e.time > killed}
    records = read_steps(run / "steps.jsonl")
    whole = [r.time for r in records if r.replicas == WORKERS and r.generation in later]
    if not whole:
        raise TimeoutError("the run ended before the replacement had joined; raise --steps")
    return Outcome(
        killed=killed,
        steps=[
            Step(time=r.time, step=r.step, rank=0, pid=0, members=r.replicas) for r in records
        ],
        rejoined=whole[0],
        lost_steps=sum(e.lost_steps for e in happened if isinstance(e, RegroupDone)),
    )  # fmt: skip


SYSTEMS: dict[str, Callable[[Path, argparse.Namespace], Outcome]] = {
    "elastic": elastic,
    "elastic_no_spare": elastic_no_spare,
    "ray_train": ray_train,
    "torchrun": torchrun,
    "torchft": torchft,
}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many is reported")
    parser.add_argument("--step-s", type=float, default=0.1, help="length of a step")
    parser.add_argument("--steps", type=int, default=180, help="of a run on Ray; others are ended")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Runs the systems in turn. Returns their medians, and why one could not be measured."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options.systems}
    notes: dict[str, str] = {}
    for repeat in range(options.repeats):
        for name in options.systems:
            if name in notes:
                continue
            with scratch("recovery") as directory:
                try:
                    outcome = SYSTEMS[name](directory, options)
                except Exception as error:
                    # One that cannot be measured is reported so; the others go on.
                    traceback.print_exc(file=sys.stderr)
                    notes[name] = f"not measured: {type(error).__name__}: {error}"
                    say(f"{name}: {notes[name]}")
                    log = directory / "log"
                    say(log.read_text()[-2000:] if log.exists() else "")
                    continue
            runs[name].append(outcome.numbers(options.step_s))
            say(f"{name} {repeat + 1}/{options.repeats}: {runs[name][-1]}")
    systems = {name: None if name in notes else median_of(runs[name]) for name in runs}
    return systems, notes


def main() -> None:
    """Runs the benchmark."""
    options = parse_arguments()
    end_properly()
    on_ray = {"elastic", "elastic_no_spare", "ray_train"} & set(options.systems)
    with contextlib.redirect_stdout(sys.stderr):
        with ray_cluster(WORKERS + 1) if on_ray else contextlib.nullcontext():
            systems, notes = measure(options)
        show_table("SIGKILL of one of four workers", systems)
    print_result({"systems": systems, "notes": notes})


if __name__ == "__main__":
    main()
