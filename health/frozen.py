"""From samples of a process to a verdict: is it frozen? Pure.

Two kinds of evidence count. The kernel says that a signal has stopped the process, twice in a row:
it does nothing until another signal comes. Or its heartbeat stands still for longer than the bound:
the process is stopped, stuck in the kernel, swapped out, or it holds the interpreter's lock.

A process that a debugger holds is not frozen. One whose beat goes on is not frozen either, however
long it stays in a phase: that is for those to judge who know what its peers do.
"""

from __future__ import annotations

from dataclasses import dataclass

from health.heartbeat import Record
from health.verdict import Verdict

STOPPED, DEBUGGED = "T", "t"
_STOPPED_SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at a process."""

    awake_s: float
    """When, on the watcher's `AwakeClock`: time in which the watcher itself was held up blames
    nobody."""
    state: str
    """State letter of the process (`health.process`)."""
    record: Record | None
    """Its heartbeat; None where it has none that can be read."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What a watcher keeps of all samples of a process."""

    last: Sample
    """The latest one."""
    stopped: int
    """Samples in a row, up to the latest, that found it stopped by a signal."""
    alive_s: float
    """Awake time of the latest sample with a new beat, or with a debugger at work."""


def observe(before: History | None, sample: Sample) -> History:
    """The history with one more sample; `before` is None for the first one."""
    stopped = before.stopped + 1 if before is not None else 1
    still = (
        before is not None
        and sample.state != DEBUGGED
        and sample.record is not None
        and before.last.record is not None
        and sample.record.beat_s == before.last.record.beat_s
    )
    return History(
        last=sample,
        stopped=stopped if sample.state == STOPPED else 0,
        alive_s=before.alive_s if still and before is not None else sample.awake_s,
    )


def decide_frozen(worker: str, history: History, freeze_timeout_s: float) -> Verdict | None:
    """Whether the process of `worker` is frozen.

    Args:
        worker: its name.
        history: what is known of it.
        freeze_timeout_s: how long a heartbeat may stand still.
    """
    if history.stopped >= _STOPPED_SAMPLES:
        return _frozen(
            worker, f"stopped by a signal (state {STOPPED} in {history.stopped} samples)"
        )
    still_s = history.last.awake_s - history.alive_s
    if still_s > freeze_timeout_s:
        return _frozen(
            worker,
            f"no heartbeat for {still_s:.1f} s, where {freeze_timeout_s:g} s are too long "
            f"(health.freeze_timeout_s), process in state {history.last.state}",
        )
    return None


def _frozen(worker: str, evidence: str) -> Verdict:
    return Verdict(cause="hang", workers=(worker,), evidence=(evidence,), confidence="certain")
