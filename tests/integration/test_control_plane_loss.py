"""The machine of the supervisor and the coordinator is lost, or Ray's head, with the driver on it:
the workers on the other machines go on, and lose no step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.protocol import events
from tests.support.hosts import HEAD, Hosts, requires_hosts
from tests.support.run_on_hosts import PATIENCE_S, PartitionRun, run_on

SOME = 20
"""Steps that show that the run goes on."""
IDLE, WORKING = 0, (1, 2)

pytestmark = [requires_hosts, pytest.mark.timeout(3 * PATIENCE_S)]


def wait_for_a_coordinator(run: PartitionRun, after_s: float) -> None:
    run.wait_until(lambda: bool(run.of_kind(events.CoordinatorStarted, after_s=after_s)))
    recorded = len(run.steps())
    run.wait_until(lambda: len(run.steps()) > recorded + SOME)


def finish(run: PartitionRun, killed_s: float) -> None:
    """The run ends as if nothing had happened."""
    run.finish()
    assert not run.of_kind(events.WorkerLost)
    assert not run.of_kind(events.RegroupCalled, after_s=killed_s)
    times = [step.time for step in run.steps()]
    assert max(b - a for a, b in itertools.pairwise(times)) < 5
    (ended,) = run.of_kind(events.RunEnded)
    assert ended.outcome == "finished"


def lose_the_machine(storage: Path, lose: Callable[[Hosts, int], None]) -> None:
    """That of driver, supervisor and coordinator, which has none of the workers."""
    with run_on(storage, hosts=3, replicas=2, idle=[IDLE], driver=IDLE) as run:
        assert run.under_way() in WORKING
        killed_s = time.time()
        lose(run.hosts, IDLE)
        run.process.wait()
        run.start_driver(HEAD)
        wait_for_a_coordinator(run, killed_s)
        finish(run, killed_s)


@pytest.mark.slow
def test_the_machine_of_the_control_plane_is_lost(tmp_path: Path) -> None:
    """Its processes end, and its kernel refuses connections."""
    lose_the_machine(tmp_path, Hosts.kill)


@pytest.mark.soak
def test_the_machine_of_the_control_plane_loses_its_power(tmp_path: Path) -> None:
    """Nothing refuses a connection then. The agents of the other two ask each other, and end nobody
    until Ray has given the machine up, which takes it longer than any lease."""
    lose_the_machine(tmp_path, Hosts.vanish)


@pytest.mark.soak
def test_the_machine_of_the_control_plane_is_cut_off(tmp_path: Path) -> None:
    """It lives, with the storage in reach: its coordinator writes everybody off, where the next one
    reads it."""
    with run_on(tmp_path, hosts=3, replicas=2, idle=[IDLE], driver=IDLE) as run:
        assert run.under_way() in WORKING
        cut_s = time.time()
        run.hosts.cut(IDLE)
        run.wait_until(lambda: len(run.of_kind(events.WorkerLost)) == len(WORKING))
        run.process.kill()
        run.process.wait()
        run.start_driver(HEAD)
        wait_for_a_coordinator(run, cut_s)
        run.hosts.kill(IDLE)  # cut off, nobody ends what is there
        run.finish()
        assert not run.of_kind(events.RegroupDone, after_s=cut_s), "nobody was in need of a roster"
        (ended,) = run.of_kind(events.RunEnded)
        assert ended.outcome == "finished"


@pytest.mark.soak
def test_the_machine_of_rays_head_is_lost(tmp_path: Path) -> None:
    """And with it driver, supervisor and coordinator. What Ray knows lies on a disk of its own, and
    another machine takes the address."""
    with run_on(tmp_path, hosts=2, replicas=2) as run:
        run.under_way()
        killed_s = time.time()
        run.hosts.kill(HEAD)
        run.process.wait()
        run.hosts.start(HEAD)
        run.start_driver(HEAD)
        wait_for_a_coordinator(run, killed_s)
        finish(run, killed_s)
