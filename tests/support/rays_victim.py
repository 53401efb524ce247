"""Has Ray end a worker that takes more memory than its monitor puts up with, and looks at it before
and after that. What is told of it stands in the output. Of a test.

    python -m tests.support.rays_victim

The watch is in this process: Ray ends its newest workers first, so a watch in one of those as well.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_system_memory
from ray._private.utils import get_used_memory

from elastic.node.health_watch import SAMPLE_S, HealthWatch, raylets_log
from health.heartbeat import Record
from health.verdict import Sign
from health.worker_load import WorkerState

MORE_BYTES = 3 << 30
"""May be taken. Ray counts the whole machine's memory: others must not take as much meanwhile."""


class Victim:
    """Takes memory."""

    def about(self) -> tuple[int, str]:
        """Its process, and what the raylet writes to."""
        return os.getpid(), str(raylets_log())

    def take(self) -> None:
        """Until it is ended."""
        taken = []
        while True:
            taken.append(b"x" * (8 << 20))


def main() -> None:
    bound = (get_used_memory() + MORE_BYTES) / get_system_memory()
    os.environ.update(RAY_memory_usage_threshold=f"{bound:.4f}")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    victim: Any = ray.remote(Victim).options(max_restarts=0).remote()
    pid, raylet = ray.get(victim.about.remote())
    record = Record(serial=3, step=2, phase=3, phase_s=0, beat_s=0, collectives=0, thread=1, left=0)
    states = [WorkerState(worker="w1", pid=pid, record=record, waits=True, works=False)]
    told: list[list[Sign]] = []
    watch = HealthWatch("n1", lambda: [*states], told.append, lambda readings: None, Path(raylet))
    watch.look(1000.0, 5000.0)
    try:
        ray.get(victim.take.remote())
    except ray.exceptions.OutOfMemoryError:
        states.clear()
        watch.look(1000.0 + SAMPLE_S, 5000.0 + SAMPLE_S)
    shown = [sign.to_json() for sign in told[-1] if sign.cause == "out_of_memory"]
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
