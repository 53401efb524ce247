"""How busy a worker's process is, and where it is in its work."""

from __future__ import annotations

import os
from dataclasses import dataclass

from health.heartbeat import Record
from health.process import parse_cpu_ticks, parse_state, read_stat
from health.reading import Reading

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """A worker's process as its node's agent knows it."""

    worker: str
    """Its name."""
    pid: int
    """Its process."""
    record: Record
    """Its heartbeat."""
    waits: bool
    """It is in a phase in which it waits for other replicas."""
    works: bool
    """It is in a phase of a step in which it does not."""
    logs: tuple[str, ...] = ()
    """Files that it writes its output to."""


def read_worker(state: WorkerState, at_s: float) -> Reading | None:
    """A reading of a worker; None where its process is gone.

    Values: `cpu_s` it had so far, of all threads; `marks` of its heartbeat; `waits`, `works` and
    `in_kernel` (asleep and not to be woken) are 0 or 1.

    Args:
        state: what the agent knows.
        at_s: now, on the monotonic clock.
    """
    stat = read_stat(state.pid)
    if stat is None:
        return None
    values = {
        "cpu_s": parse_cpu_ticks(stat) / _TICKS_PER_S,
        "marks": float(state.record.serial),
        "waits": float(state.waits),
        "works": float(state.works),
        "in_kernel": float(parse_state(stat) == "D"),
    }
    return Reading(kind="worker", of=state.worker, at_s=at_s, values=values, pids=(state.pid,))
