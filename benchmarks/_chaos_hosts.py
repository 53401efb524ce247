"""A run of the soak on hosts, with a driver that is a program of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks._chaos import Schedule
from tests.support import ROOT
from tests.support.hosts import HEAD, Hosts
from tests.support.tiny import Outcome

CONTROL = 0
"""The host of the driver and the control plane, until it is lost; then they are on the head."""
_PROGRAM = ROOT / "benchmarks/_chaos_driver.py"
_END_S = 60.0


def hosts_of(schedule: Schedule) -> Hosts:
    """One for the control plane, those of each replica, and one for the spares."""
    spares = [schedule.spares] if schedule.spares else []
    return Hosts([0, *schedule.homes, *spares])


class HostDriver:
    """The driver of a run on hosts.

    Args:
        hosts: the cluster.
        arguments: of the program.
        root: the run's directory; beside it lie the outcome and a log.
    """

    def __init__(self, hosts: Hosts, arguments: list[str], root: Path) -> None:
        self._hosts, self._log = hosts, root.with_suffix(".log")
        self._out = root.with_suffix(".json")
        self._program = [sys.executable, str(_PROGRAM), hosts.address, str(self._out), *arguments]
        self._moving = threading.Lock()
        self._process = self._start(CONTROL)
        self.left_behind: list[str] = []
        """What was there after the run."""

    def fit(self) -> Outcome:
        """Waits for the end of the run. Raises RuntimeError where it has failed."""
        while True:
            process = self._process
            status = process.wait()
            with self._moving:
                if process is self._process:
                    break
        if status != 0:
            raise RuntimeError(f"the driver ended with {status}: {self._log.read_text()[-2000:]}")
        self.left_behind, outcome = json.loads(self._out.read_text())
        return Outcome(**outcome)

    def lose_machine(self) -> None:
        """Ends everything on the driver's host; another driver attaches to the run."""
        with self._moving:
            self._hosts.kill(CONTROL)
            self._process.wait(_END_S)
            self._process = self._start(HEAD)

    def _start(self, host: int) -> subprocess.Popen[bytes]:
        return self._hosts.popen(host, self._program, self._log)
