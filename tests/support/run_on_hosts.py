"""A run on several hosts (`hosts.py`), slow until a file appears, and what its records say."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from elastic.protocol import events
from elastic.reporting.event_log import read_events, read_steps
from tests.support import ROOT
from tests.support.gated_run import saved_weights
from tests.support.growing_run import STEPS
from tests.support.hosts import HEAD, Hosts

PROGRAM = ROOT / "tests/support/partition_run.py"
UNDER_WAY = 15
"""Steps before anything happens: there is a checkpoint by then."""
PATIENCE_S = 300.0

E = TypeVar("E", bound=events.Event)


class PartitionRun:
    """A run on hosts, and what its records say.

    Args:
        hosts: the cluster.
        storage: where the run directory lies, which all hosts share.
        replicas: of the run.
        shard: degree.
        driver: the host that its driver starts on.
        program: what its driver runs.
        more: arguments for it, after those of `partition_run.py`.
    """

    def __init__(
        self,
        hosts: Hosts,
        storage: Path,
        replicas: int,
        shard: int,
        driver: int = HEAD,
        program: Path = PROGRAM,
        more: Sequence[str] = (),
    ) -> None:
        self.hosts, self.storage, self.root = hosts, storage, storage / "run"
        self.gate, self._log = storage / "gate", storage / "log"
        arguments = [hosts.address, storage, self.gate, replicas, shard, *more]
        self._program = [sys.executable, str(program), *map(str, arguments)]
        self.start_driver(driver)

    def start_driver(self, host: int) -> None:
        """Starts the run, or attaches to it, if the driver before this one has ended."""
        self.process = self.hosts.popen(host, self._program, self._log)

    def of_kind(self, kind: type[E], *, after_s: float = 0.0) -> list[E]:
        """Events later than `after_s`, seconds since the epoch."""
        known = read_events(self.root / "events.jsonl")
        return [event for event in known if isinstance(event, kind) and event.time > after_s]

    def steps(self) -> list[events.StepRecord]:
        return read_steps(self.root / "steps.jsonl")

    def wait_until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert self.process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.of_kind(events.Event)
            time.sleep(0.05)

    def wait_for_replicas(self, count: int, *, after_s: float) -> None:
        """Waits for a roster of `count` replicas, all of them with state."""

        def stands() -> bool:
            done = self.of_kind(events.RegroupDone, after_s=after_s)
            return bool(done) and sum(map(bool, done[-1].lanes.values())) == count

        self.wait_until(stands)

    def under_way(self) -> int:
        """Waits for the middle of the run. Returns the host of the lead worker, which records the
        steps and saves."""
        self.wait_until(lambda: len(self.steps()) > UNDER_WAY)
        return self.hosts_of(0)[0]

    def hosts_of(self, replica: int) -> list[int]:
        """The hosts of the workers of the first replica of this number, by rank."""
        formed = [r.workers for r in self.of_kind(events.ReplicaForming) if r.replica == replica]
        pids = {w.worker: w.pid for w in self.of_kind(events.WorkerJoined)}
        return [self.hosts.host_of(pids[worker]) for worker in formed[0]]

    def finish(self) -> None:
        """Opens the gate, waits for the end, and checks the outcome."""
        self.gate.touch()
        assert self.process.wait(PATIENCE_S) == 0, self._log.read_text()[-4000:]
        assert [step.step for step in self.steps()] == list(range(STEPS))
        runs = (self.root, self.storage / "whole")
        found, whole = (saved_weights(run / "checkpoints", STEPS) for run in runs)
        assert found == whole
        assert json.loads((self.storage / "left.json").read_text()) == []

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def run_on(
    tmp_path: Path,
    *,
    hosts: int,
    cpus: int = 1,
    replicas: int,
    shard: int = 1,
    idle: Sequence[int] = (),
    driver: int = HEAD,
    program: Path = PROGRAM,
    more: Sequence[str] = (),
) -> Iterator[PartitionRun]:
    """A run of a cluster of its own."""
    with Hosts([0 if host in idle else cpus for host in range(hosts)]) as there:
        run = PartitionRun(there, tmp_path, replicas, shard, driver, program, more)
        try:
            yield run
        finally:
            run.close()
