"""What a run may not leave behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ray

from elastic.protocol import events
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from health.process import read_born_ticks, read_state

_OF_RAY = ("_AutoscalingCoordinatorActor", "DatasetManager")
"""Ray's own, one of each in a cluster, for as long as the cluster lasts."""


def find_left_behind(root: Path, patience_s: float = 15.0) -> list[str]:
    """Processes, actors, shared memory and placement groups of a run that is over.

    Ray ends actors in its own time: what is there is looked at again for a while.
    """
    until = time.monotonic() + patience_s
    while (left := _look_for_left_behind(root)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _look_for_left_behind(root: Path) -> list[str]:
    paths = RunPaths(root=root)
    pids: dict[int, float] = {}
    for event in read_events(paths.events):
        if isinstance(event, events.WorkerJoined | events.CoordinatorStarted):
            pids[event.pid] = event.time
    left = [f"process {pid}" for pid, joined in pids.items() if _lives(pid, joined)]
    if paths.memory.exists():
        left.append(str(paths.memory))
    left += [
        f"placement group {row['name']} {row['state']}"
        for row in ray.util.placement_group_table().values()
        if row["state"] != "REMOVED"
    ]
    left += [
        f"actor {row['ActorClassName']} {row['State']}"
        for row in ray._private.state.actors().values()
        if row["State"] != "DEAD" and row["ActorClassName"] not in _OF_RAY
    ]
    return left


def _lives(pid: int, joined: float) -> bool:
    """Whether the process that had this id at the time `joined` still runs."""
    state, born_ticks = read_state(pid), read_born_ticks(pid)
    if state is None or born_ticks is None:
        return False
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    started = time.time() - uptime_s + born_ticks / os.sysconf("SC_CLK_TCK")
    return state not in "ZX" and started < joined + 1.0
