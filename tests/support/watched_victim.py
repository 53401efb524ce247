"""Looks at a worker of its own before and after that takes what memory there is; then what was
told of it stands in the output, and the worker's exit status. Of a test, which bounds the memory.

    python -m tests.support.watched_victim
"""

from __future__ import annotations

import json
import subprocess
import sys

from elastic.node.health_watch import SAMPLE_S, HealthWatch
from health.heartbeat import Record
from health.verdict import Sign
from health.worker_load import WorkerState

_TAKE = """
open("/proc/self/oom_score_adj", "w").write("1000")
input()
bytes(range(256)) * (1 << 22)
"""
"""A GB, and the kernel's first choice."""


def main() -> None:
    victim = subprocess.Popen([sys.executable, "-c", _TAKE], stdin=subprocess.PIPE)
    record = Record(serial=3, step=2, phase=3, phase_s=0, beat_s=0, collectives=0, thread=1, left=0)
    states = [WorkerState(worker="w1", pid=victim.pid, record=record, waits=True, works=False)]
    told: list[list[Sign]] = []
    watch = HealthWatch("n1", lambda: [*states], told.append, lambda readings: None)
    watch.look(1000.0, 5000.0)
    victim.communicate(b"\n")
    states.clear()
    watch.look(1000.0 + SAMPLE_S, 5000.0 + SAMPLE_S)
    shown = [sign.to_json() for sign in told[-1] if sign.name == "oom_killed"]
    print(json.dumps({"status": victim.returncode, "signs": shown}))


if __name__ == "__main__":
    main()
