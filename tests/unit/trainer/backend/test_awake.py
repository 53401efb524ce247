"""A thread's time awake: with a core, and without one that it wants; asleep it does not pass."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from tests.support import ROOT
from tests.support.held_back import held_back, requires_quota, throttled_periods
from trainer.backend.awake import AwakeTime

CPU_S = 0.2


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_it_passes_while_a_thread_computes_and_not_while_it_waits() -> None:
    awake_s = AwakeTime()
    begin_s, begin = awake_s(), time.perf_counter()
    compute(CPU_S)
    computed_s = awake_s() - begin_s
    assert CPU_S <= computed_s <= time.perf_counter() - begin + 0.01
    threading.Event().wait(1.0)
    assert awake_s() - begin_s - computed_s < 0.5
    awake_s.close()
    awake_s.close()


COMPUTES = f"""
import sys, time
from trainer.backend.awake import AwakeTime
awake_s = AwakeTime()
print("here", flush=True)
sys.stdin.readline()
begin_s, until = awake_s(), time.thread_time() + {CPU_S}
while time.thread_time() < until:
    pass
print(awake_s() - begin_s)
"""


@requires_quota
def test_it_passes_while_a_cgroup_holds_the_thread_back() -> None:
    command = [sys.executable, "-c", COMPUTES]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "here\n"
        with held_back([process.pid], cores=0.25):
            process.stdin.write("go\n")
            process.stdin.flush()
            awake_s = float(process.stdout.readline())
            assert throttled_periods() > 0
    assert awake_s > 3 * CPU_S
