"""A worker that the kernel, or Ray before it, ends as memory runs out: the cause is told, by the
kernel's count or Ray's own log. The container is a cgroup, with a run and a Ray cluster of its
own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from health.diagnosis import Facts, diagnose
from health.kernel_log import KMSG
from health.verdict import Sign, sign_from_json
from tests.support import ROOT
from tests.support.little_memory import little_memory, requires_limit
from tests.support.watching import events_of, wait_until

PLENTY_BYTES, MORE_BYTES = 8 << 30, 256 << 20

_TAKE = """
import sys
taken = []
while "oom_kill 0" in open(sys.argv[1]).read():
    taken.append(b"x" * (8 << 20))
"""
"""Takes memory until the kernel has ended a process for it."""


def say_of(pid: int) -> None:
    """What the kernel would, of a task that waits: then the run's records show the next look."""
    KMSG.write_text(f"INFO: task ray:{pid} blocked for more than 120 seconds.\n")


def shown(root: Path, worker: str, name: str) -> set[str]:
    """Who has said so of a worker."""
    signs = [s for e in events_of(root, "signs_changed") for s in e["signs"]]
    return {s["source"] for s in signs if (s.get("worker"), s["name"]) == (worker, name)}


@pytest.mark.soak
@requires_limit
@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="may not write to /dev/kmsg")
def test_a_worker_whose_memory_ran_out_is_told_as_such(tmp_path: Path) -> None:
    root, gate = tmp_path / "gated", tmp_path / "gate"
    with little_memory(PLENTY_BYTES) as group:
        arguments = ["tests/support/gated_run.py", "local", str(tmp_path), str(gate), "2"]
        run = subprocess.Popen([*group.join, sys.executable, *arguments], cwd=ROOT)
        try:
            wait_until(lambda: events_of(root, "regroup_done"))
            lost = events_of(root, "worker_joined")[0]
            say_of(lost["pid"])
            wait_until(lambda: shown(root, lost["worker"], "hung_task"), 60.0)
            group.prefer(lost["pid"])
            group.limit(group.used_bytes + MORE_BYTES)
            subprocess.run(
                [*group.join, sys.executable, "-c", _TAKE, str(group.counter)], check=True
            )
            group.limit(PLENTY_BYTES)
            wait_until(
                lambda: shown(root, lost["worker"], "oom_killed") == {"reading", "log"}, 60.0
            )
        finally:
            gate.touch()
            run.wait(120)
    assert run.returncode == 0
    (one,) = events_of(root, "worker_lost")
    assert (one["worker"], one["cause"]) == (lost["worker"], "crash")
    (one,) = json.loads((root / "report.json").read_text())["verdicts"]
    assert (one["verdict"]["cause"], one["verdict"]["workers"]) == (
        "out_of_memory",
        [lost["worker"]],
    )


@pytest.mark.soak
def test_a_worker_that_ray_ends_for_its_memory_is_told_of_in_rays_words() -> None:
    """Its memory monitor comes before the kernel, which counts nothing then."""
    command = [sys.executable, "-m", "tests.support.rays_victim"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=180).stdout
    found = [sign for sign in map(sign_from_json, json.loads(said)) if sign is not None]
    signs = {sign.name: sign for sign in found}
    assert signs.keys() == {"ray_oom_killed", "ray_memory_limit"}
    loss = Sign(
        name="crash",
        source="loss",
        role="root",
        cause="crash",
        subject="worker",
        detail="process 7 ended by SIGKILL",
        worker="w1",
        node="n1",
    )
    facts = Facts(signs=[loss, *found], nodes={"w1": "n1"}, replicas={}, names={})
    (verdict,) = diagnose(facts)
    assert (verdict.cause, verdict.workers) == ("out_of_memory", ("w1",))
    assert any("exceeded threshold" in words for words in verdict.evidence)
