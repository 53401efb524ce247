"""One line that says how the run goes, a line of its own for everything worth knowing at once, and
the report at the end.

In a terminal the progress line is rewritten in place; in a log file it is printed plainly, every
few seconds at most. `format_progress` and `format_event` are pure; `ProgressPrinter` decides when
to print and does it.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TextIO

from elastic.protocol.events import (
    AgentEnded,
    BelowMinimum,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSkipped,
    CoordinatorStarted,
    Draining,
    Evaluated,
    Event,
    FaultFired,
    HealFailed,
    HelperKilled,
    NodeChecked,
    NodeChecking,
    NodeReplacement,
    Profiled,
    RegroupDone,
    ReplicaForming,
    ReplicaHealed,
    ReplicasCompared,
    RestoreWaits,
    RetentionFailed,
    RunEnded,
    RunStarted,
    SignsChanged,
    SnapshotFailed,
    SnapshotSkipped,
    SnapshotTaken,
    StepRecord,
    StepSkipped,
    StopRequested,
    StragglersFound,
    TrainingTrouble,
    VerdictReached,
    WentBack,
    WorkerJoined,
    WorkerLost,
    WorkerRefused,
)
from elastic.reporting.brief import brief
from elastic.reporting.callback import Callback
from elastic.reporting.report import (
    Report,
    format_checked,
    format_refused,
    format_remedy,
    format_replacement,
    report_text,
)

TTY_INTERVAL_S = 0.1
"""Least time between two progress lines in a terminal: as fast as an eye can follow."""
LOG_INTERVAL_S = 5.0
"""Least time between two progress lines in a log file."""
SPEED_WINDOW_STEPS = 20
"""Steps over which speed and time left are measured."""

CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True, kw_only=True)
class ProgressState:
    """What the progress line shows. None stands for what is not known yet."""

    step: int = 0
    """Steps done."""
    steps: int = 0
    """Steps the run will have in the end."""
    loss: float | None = None
    """Training loss of the last step, nats per token."""
    tokens_per_s: float | None = None
    """Tokens a second over the last steps."""
    terms: str = "tokens"
    """What those are; see `RunStarted`."""
    replicas: int = 0
    """Replicas alive."""
    max_replicas: int = 0
    """Replicas of the full layout."""
    generation: int = 0
    """Generation of the roster."""
    seconds_left: float | None = None
    """Time to the end at the present speed."""
    workers: int = 0
    """Workers of the full layout, spares included; 0: not known."""
    joined: int = 0
    """Workers that have started; before the first step alone."""
    stage: str = ""
    """What the workers do before their first step."""


def format_progress(state: ProgressState) -> str:
    """The progress line, without a newline."""
    if state.stage:
        return f"{state.stage}: {state.joined} of {state.workers} workers there"
    parts = [f"step {state.step}/{state.steps}"]
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4f}")
    if state.tokens_per_s is not None:
        parts.append(f"{_short_number(state.tokens_per_s)} {state.terms}/s")
    parts.append(f"replicas {state.replicas}/{state.max_replicas}")
    parts.append(f"generation {state.generation}")
    if state.seconds_left is not None:
        parts.append(f"{format_duration(state.seconds_left)} left")
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """A duration as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_event(event: Event, last_commit: float | None = None) -> str | None:
    """The line for a notable event; None for an event that is not worth one. A traceback is the
    exception alone: the whole is in the error that the run ends with, and in `elastic logs`.

    Args:
        event: what happened.
        last_commit: when the last step before it was committed, in seconds since the epoch; None:
            this start of the run has done none.
    """
    match event:
        case FaultFired():
            return f"fault {event.fault} fired in step {event.step} on {event.worker}"
        case WorkerLost():
            who = f"{event.worker} ({event.slot or 'spare'})"
            return f"lost {who}: {event.cause}, {brief(event.detail)}"
        case RegroupDone() if event.outcome != "start":
            return _format_regroup(event, last_commit)
        case ReplicaHealed():
            return (
                f"replica {event.replica} healed from replica {event.source}: "
                f"{event.bytes / 1e6:.1f} MB in {event.seconds:.2f} s, "
                f"{event.catch_up_steps} steps made up for"
            )
        case HealFailed():
            return f"heal of {event.slot} from replica {event.source} failed: {event.reason}"
        case AgentEnded():
            return f"the agent of node {event.node} ended: {event.detail}"
        case HelperKilled():
            return f"killed the {event.helper} of node {event.node}: {event.detail}"
        case SignsChanged() if event.signs:
            roots = [sign["detail"] for sign in event.signs if sign["role"] == "root"]
            return f"node {event.node} shows: {'; '.join(roots)}" if roots else None
        case StragglersFound():
            where = f" on node {event.nodes[0]}" if event.nodes else ""
            return f"SLOW: {', '.join(event.workers)}{where}: {event.detail}"
        case StopRequested() if last_commit is None:
            return (
                f"stopping after the first step, or, where none is under way, once the workers "
                f"have started ({event.reason})"
            )
        case StopRequested():
            return f"stopping after this step, with a checkpoint ({event.reason})"
        case Draining():
            left = "" if event.deadline_s is None else f", {event.deadline_s:.0f} s left"
            return f"{', '.join(event.workers)} will go ({event.reason}{left})"
        case CoordinatorStarted(anew=True):
            return f"the coordinator was lost and started anew (process {event.pid})"
        case BelowMinimum():
            return f"waiting: {event.alive} of {event.needed} replicas alive, {event.missing}"
        case StepSkipped():
            return f"step {event.step} skipped: loss {event.loss}, gradient {event.grad_norm}"
        case CheckpointFailed():
            return f"checkpoint of {event.step} steps cannot be read: {event.reason}"
        case RestoreWaits():
            return f"the checkpoint of {event.step} steps is waited for: {event.reason}"
        case RetentionFailed():
            return f"old checkpoints cannot be deleted, and stay: {event.reason}"
        case SnapshotFailed():
            return f"snapshot of {event.step} steps cannot be read: {event.reason}"
        case VerdictReached() if event.step not in ("retry", "new_process"):
            return format_remedy(event)
        case NodeChecking() if last_commit is not None:  # before, the stage says it
            return f"node {event.node}: {event.check} ({event.number} of {event.total})"
        case NodeChecked():
            return "\n".join(format_checked(event)) or None
        case NodeReplacement():
            return format_replacement(event)
        case WorkerRefused():
            return format_refused(event)
        case ReplicasCompared(equal=False):
            return f"REPLICAS DIFFER after {event.step} steps"
        case WentBack():
            passed = "" if not event.skip else f", passing over {event.skip[1]} global batches"
            return f"going back from step {event.before} to {event.step}{passed}: {event.reason}"
        case TrainingTrouble():
            return f"step {event.last}: {event.detail} ({event.action})"
        case Profiled():
            whole = "" if event.problem is None else f" ({event.problem})"
            return f"profile of steps {event.first} to {event.last}: {event.file}{whole}"
        case Evaluated():
            return f"validation loss {event.val_loss:.4f} after {event.step} steps"
        case RunEnded():
            return f"run {event.outcome} after {event.step} steps" + (
                f": {brief(event.error)}" if event.error else ""
            )
    return None


def _format_regroup(event: RegroupDone, last_commit: float | None) -> str:
    redone = {"lost": event.lost_steps, "repeated": event.repeated_steps}
    parts = [
        f"generation {event.generation}: {event.replicas} replicas at step {event.step}",
        event.outcome.replace("_", " "),
        *(f"{n} {what}" for what, n in redone.items() if n),
    ]
    if last_commit is not None:
        parts.append(f"stalled {event.time - last_commit:.2f} s since the last commit")
    return ", ".join(parts)


class ProgressPrinter(Callback):
    """Prints the progress of one run. A stream that takes nothing, as on a full disk, costs lines.

    Args:
        stream: where to print.
        is_tty: whether it is a terminal; None asks the stream.
        interval_s: least time between two progress lines; None takes what suits the stream.
        clock: time in seconds from any origin, for the interval.
    """

    def __init__(
        self,
        stream: TextIO,
        is_tty: bool | None = None,
        interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._is_tty = stream.isatty() if is_tty is None else is_tty
        self._interval_s = (
            interval_s if interval_s is not None
            else TTY_INTERVAL_S if self._is_tty else LOG_INTERVAL_S
        )  # fmt: skip
        self._clock = clock
        self._printed_at = float("-inf")
        self._shown: str | None = None
        self._shown_stage = ""
        self._state = ProgressState()
        self._recent: deque[StepRecord] = deque(maxlen=SPEED_WINDOW_STEPS + 1)
        self._skipped: list[int] = []
        self._unsaved: str | None = None

    def show(self) -> None:
        """Print the progress line if it is due; call it when all that is known was told."""
        due = self._clock() - self._printed_at >= self._interval_s
        under_way = self._state.step or self._state.stage
        if under_way and (due or self._state.stage != self._shown_stage):
            self._print_progress()

    def on_end(self, report: Report) -> None:
        """Show the last state, and the report below it."""
        if self._state.step:
            self._print_progress()
        if self._is_tty and self._shown:
            self._put("\n")
        self._put(report_text(report) + "\n")

    def on_step(self, record: StepRecord) -> None:
        """Take in what the progress line shows."""
        if self._recent and record.step <= self._recent[-1].step:
            self._recent.clear()
        self._recent.append(record)
        tokens_per_s, step_s = _speed(self._recent)
        left = max(0, self._state.steps - record.step - 1)
        self._state = replace(
            self._state,
            step=record.step + 1,
            loss=record.loss,
            tokens_per_s=tokens_per_s,
            replicas=record.replicas,
            generation=record.generation,
            seconds_left=None if step_s is None else left * step_s,
            stage="",
        )

    def on_event(self, event: Event) -> None:
        """Take it in, and print its line if it has one."""
        if isinstance(event, RunStarted):
            self._recent.clear()
            self._state = _starting(event)
        elif isinstance(event, RegroupDone):
            self._state = replace(self._state, replicas=event.replicas, generation=event.generation)
        if not self._recent:
            self._state = _before_the_first_step(self._state, event)
        line = format_event(event, self._recent[-1].time if self._recent else None)
        line = line or self._saving(event) or self._without_snapshots(event)
        if line is not None:
            self._print_line(line)

    def _saving(self, event: Event) -> str | None:
        """A line at the first checkpoint that is not written, at each with another reason, and at
        the next one that is."""
        match event:
            case CheckpointSkipped() if event.reason != self._unsaved:
                self._unsaved = event.reason
                return f"checkpoint of {event.step} steps NOT WRITTEN: {event.reason}"
            case CheckpointCommitted():
                again = "" if self._unsaved is None else ": saving works again"
                self._unsaved = None
                if again or not self._is_tty:
                    took = f"committed in {event.seconds:.2f} s"
                    return f"checkpoint of {event.step} steps {took}{again}"
        return None

    def _without_snapshots(self, event: Event) -> str | None:
        """A line at the second one in a row that is not taken: the first may wait for one before
        it. No further line until one is taken."""
        if isinstance(event, SnapshotTaken):
            self._skipped.clear()
        if isinstance(event, SnapshotSkipped) and len(self._skipped) < 2:
            if event.step not in self._skipped:  # each writer tells
                self._skipped.append(event.step)
            if len(self._skipped) == 2:
                return f"no snapshots of steps {self._skipped[0]} and {event.step}: {event.reason}"
        return None

    def _print_line(self, text: str) -> None:
        """Print a line that stays, and in a terminal the progress line below it again."""
        text += "\n"
        if self._is_tty:
            text = CLEAR_LINE + text + (self._shown or "")
        self._put(text)

    def _print_progress(self) -> None:
        text = format_progress(self._state)
        self._printed_at, self._shown_stage = self._clock(), self._state.stage
        if self._is_tty:
            # One column stays free: a full last column makes some terminals wrap.
            text = text[: shutil.get_terminal_size().columns - 1]
            self._put(CLEAR_LINE + text)
        elif text != self._shown:
            self._put(text + "\n")
        self._shown = text

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.write(text)
            self._stream.flush()


def _starting(event: RunStarted) -> ProgressState:
    degrees = [n for name, n in event.layout.items() if name not in ("lanes", "spares")]
    return ProgressState(
        steps=event.steps,
        terms=event.terms,
        max_replicas=event.layout.get("replicas", 0),
        workers=math.prod(degrees) + event.layout.get("spares", 0),
    )


def _before_the_first_step(state: ProgressState, event: Event) -> ProgressState:
    match event:
        case WorkerJoined() if state.generation == 0:
            return replace(state, joined=state.joined + 1, stage="starting the workers")
        case NodeChecking() if state.stage:
            return replace(state, stage=f"checking the machines ({event.check})")
        case ReplicaForming() if state.stage:
            return replace(state, stage="building the replicas")
        case RegroupDone() if state.stage:
            return replace(state, stage="computing the first step")
        case RunEnded():
            return replace(state, stage="")
    return state


def _speed(recent: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    """Tokens a second and seconds a step over the last steps; None while there is one step."""
    seconds = recent[-1].time - recent[0].time
    if seconds <= 0:
        return None, None
    tokens = sum(r.tokens for r in recent) - recent[0].tokens
    return tokens / seconds, median(b.time - a.time for a, b in pairwise(recent))


def _short_number(value: float) -> str:
    """1234567 as 1.2M; three digits or so."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"
