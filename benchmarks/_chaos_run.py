"""One run of the soak, and what is looked at afterwards."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._chaos import ROOM_FOR_ALL, STEPS, Deed, Schedule
from benchmarks._chaos_hand import FleetHand, Hand, HostHand
from benchmarks._chaos_hosts import HostDriver, hosts_of
from benchmarks._chaos_left import find_left_behind
from benchmarks._chaos_losses import (
    find_missed_faults,
    find_unexplained_losses,
    find_unfired,
    find_wrong_causes,
)
from benchmarks._chaos_machines import Machines
from benchmarks._chaos_restores import find_needless_restores
from benchmarks._chaos_stalls import find_long_stalls
from benchmarks._chaos_trainer import make_trainer
from benchmarks._chaos_undisturbed import Whole
from elastic.protocol import events
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events, read_steps
from tests.support.tiny import Outcome, fit


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a run."""

    error: str | None
    """Why it did not finish."""
    ledger_exact: bool
    """Every sample was used exactly once."""
    bitwise_equal: bool
    """Weights, losses and samples are those of the undisturbed run, and of all replicas."""
    faults_fired: int
    """Injected faults that went off, each worker counted."""
    faults_unfired: int
    """Those that were drawn and did not, each slot counted; one that should have is a complaint."""
    actions_done: int
    """Things done to the cluster."""
    complaints: tuple[str, ...]
    """What else was wrong."""
    left_behind: tuple[str, ...]
    """What was still there after it."""
    wall_s: float
    """From the start to the end."""

    @property
    def good(self) -> bool:
        """Whether nothing was wrong."""
        wrong = self.error or self.complaints or self.left_behind
        return self.ledger_exact and self.bitwise_equal and not wrong


def run_schedule(
    schedule: Schedule,
    drawn: Sequence[str],
    text: Path,
    storage: Path,
    machines: Machines,
    whole: Whole,
) -> Verdict:
    """Runs one schedule and looks at everything.

    Args:
        schedule: it.
        drawn: options of `_chaos_driver.py` that draw it.
        text: what is learned.
        storage: the run's directory is made in it.
        machines: that it has, where it is not on hosts.
        whole: how it is to end.
    """
    if not schedule.hosts:
        machines.have(schedule.machines or (ROOM_FOR_ALL,))
        run = _Run(schedule, storage, lambda: fit(make_trainer(schedule, text, storage)))
        run.go(FleetHand(machines, *run.of_hand))
        return run.judge(whole, find_left_behind(run.root))
    with hosts_of(schedule) as hosts:
        arguments = [str(schedule.seed), *drawn, str(text), str(storage)]
        driver = HostDriver(hosts, arguments, storage / schedule.name)
        run = _Run(schedule, storage, driver.fit)
        run.go(HostHand(hosts, driver.lose_machine, *run.of_hand))
    return run.judge(whole, driver.left_behind)


class _Run:
    """A run on a thread of its own, beside the hand that does things to it."""

    def __init__(self, schedule: Schedule, storage: Path, fit: Callable[[], Outcome]) -> None:
        self._schedule, self._fit = schedule, fit
        self.root, self._pause = storage / schedule.name, storage / f"{schedule.name}.pause"
        self._began_s, self._thread = time.monotonic(), threading.Thread(target=self._run)
        self._ends: list[Outcome | Exception] = []
        self._deeds: list[Deed] = []

    @property
    def of_hand(self) -> tuple[Schedule, Path, Path, threading.Thread]:
        """What a hand must know."""
        return self._schedule, self.root, self._pause, self._thread

    def go(self, hand: Hand) -> None:
        """Runs to the end."""
        self._thread.start()
        try:
            hand.work()
        finally:
            self._thread.join()
        self._deeds = hand.deeds

    def judge(self, whole: Whole, left_behind: Sequence[str]) -> Verdict:
        """Looks at everything."""
        schedule, (end,) = self._schedule, self._ends
        outcome = end if isinstance(end, Outcome) else None
        happened = read_events(RunPaths(root=self.root).events)
        return Verdict(
            error=None if outcome else f"{type(end).__name__}: {end}",
            ledger_exact=outcome is not None and outcome.samples == whole.samples,
            bitwise_equal=outcome is not None
            and outcome.report["replicas_equal"] is not False  # None: one alone was left
            and (outcome.params, outcome.losses) == (whole.params, whole.losses),
            faults_fired=0 if outcome is None else outcome.report["faults_fired"],
            faults_unfired=len(find_unfired(happened, schedule.faults, schedule.layout)),
            actions_done=len(self._deeds),
            complaints=tuple(_complaints(schedule, self.root, self._deeds)) if outcome else (),
            left_behind=tuple(left_behind),
            wall_s=time.monotonic() - self._began_s,
        )

    def _run(self) -> None:
        try:
            self._ends.append(self._fit())
        except Exception as failure:
            self._ends.append(failure)


def _complaints(schedule: Schedule, root: Path, deeds: Sequence[Deed]) -> Iterator[str]:
    """What the records of a finished run must not show."""
    paths, faults, layout = RunPaths(root=root), schedule.faults, schedule.layout
    happened = read_events(paths.events)
    every = read_all_steps(paths.steps)
    yield from find_wrong_causes(happened, faults, deeds)
    yield from find_unexplained_losses(happened, deeds)
    yield from find_missed_faults(happened, every, faults, layout)
    least = schedule.min_replicas * layout.workers
    yield from find_long_stalls(
        happened,
        every,
        schedule.health,
        least_workers=least,
        deeds=deeds,
        evaluation_s=schedule.evaluation_s,
    )
    for generation in find_needless_restores(happened, every, layout.workers):
        yield f"generation {generation} went back although a whole copy lived"
    for event in happened:
        if isinstance(event, events.RegroupDone) and event.repeated_steps > 1:
            yield f"generation {event.generation} repeated {event.repeated_steps} steps"
    if [step.step for step in read_steps(paths.steps)] != list(range(STEPS)):
        yield "the records lack steps"


def read_all_steps(path: Path) -> list[events.StepRecord]:
    """Every whole step record of a file, also of steps that were lost later."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [events.StepRecord(**json.loads(line)) for line in lines]
