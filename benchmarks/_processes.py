"""Processes that a benchmark starts and is sure to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Processes(contextlib.AbstractContextManager["Processes"]):
    """Starts `python -m` processes in sessions of their own; on exit all of them are killed.

    Args:
        log: file that their output goes to.
        path: directories for their PYTHONPATH, besides the repository.
        variables: further environment.
    """

    def __init__(
        self, log: Path, *, path: Sequence[Path] = (), variables: dict[str, str] | None = None
    ) -> None:
        self.log = log
        python_path = os.pathsep.join(str(place) for place in (ROOT, *path))
        self._environment = {
            **os.environ,
            "PYTHONPATH": python_path,
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts `python arguments...`."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def processes_below(ancestor: int | None) -> list[int]:
    """Process ids of `ancestor` and all below it."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (place / "stat").read_text().rpartition(")")[2].split()
            parents[int(place.name)] = int(status[1])
    return sorted(pid for pid in parents if _is_below(pid, ancestor, parents))


def _is_below(pid: int, ancestor: int | None, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
