"""Looks at a run from outside while it goes on, and waits for what it should come to."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.reporting.event_log import read_events, read_steps


def events_of(root: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events so far of the run in `root`, as they stand in its file: of `kinds`, or all."""
    happened = (event.to_json() for event in read_events(root / "events.jsonl"))
    return [event for event in happened if not kinds or event["kind"] in kinds]


def incidents_of(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The folders of incidents of the run in `root`, with their manifests; without those of slow
    steps, which a busy machine may have at any time."""
    manifests = sorted(root.glob("incidents/*/manifest.json"))
    found = [(path.parent, json.loads(path.read_text())) for path in manifests]
    return [(folder, manifest) for folder, manifest in found if "resolved" not in manifest]


def steps_of(root: Path) -> int:
    """How many steps of the run in `root` are recorded so far."""
    return len(read_steps(root / "steps.jsonl"))


def check_replicas_equal(report: Mapping[str, Any], root: Path) -> None:
    """The replicas of the run in `root` did not differ, and were compared where at least two had
    state at its end. A run does not wait for a newcomer, so one that came late may have none."""
    (*_, last) = events_of(root, "regroup_done")
    dealt = [lanes for lanes in last["lanes"].values() if lanes]  # to those alone that have state
    healed = [event["generation"] for event in events_of(root, "replica_healed")]
    compared = len(dealt) > 1 or last["generation"] in healed
    assert report["replicas_equal"] in ([True] if compared else [True, None])


def wait_until(
    what: Callable[[], object], deadline_s: float = 120.0, *, pause_s: float = 0.01
) -> None:
    """Waits for `what` to become true; looks every `pause_s`."""
    deadline = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(pause_s)


def stop_at_once(process: subprocess.Popen[bytes], root: Path) -> None:
    """Interrupts a program's run twice: at the first Ctrl-C it would end the step under way, which
    may be waiting for a file."""
    process.send_signal(signal.SIGINT)
    wait_until(lambda: process.poll() is not None or bool(events_of(root, "stop_requested")))
    process.send_signal(signal.SIGINT)


def parent_of(pid: int) -> int:
    """The process that started `pid`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def actor_beside(worker: int, name: str) -> int:
    """Process of the actor whose class is `name`: a child of the raylet that the worker belongs
    to."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError):
            pid = int(path.parent.name)
            ours = parent_of(pid) == parent_of(worker)
            if ours and path.read_bytes().startswith(f"ray::{name}".encode()):
                return pid
    raise AssertionError(f"there is no {name}")
