"""A host is cut off, or lost as a whole, in the middle of a run on several: the run goes on without
it, what is cut off trains and publishes nothing, and the weights are the undisturbed run's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from checkpointing import Keys, load_manifest, open_store
from elastic.protocol import events
from tests.support.hosts import requires_hosts
from tests.support.partition_run import NODE_TIMEOUT_S
from tests.support.run_on_hosts import PATIENCE_S, PartitionRun, run_on

SOME = 5
"""Steps that show that the run goes on."""
LATE_S = 6.0
"""How much later than a lease's end things may happen, on a machine with other work."""

pytestmark = [requires_hosts, pytest.mark.soak, pytest.mark.timeout(3 * PATIENCE_S)]


def workers_on(run: PartitionRun, host: int) -> dict[str, int]:
    """Workers of the run that live on a host now, with their process ids."""
    there = run.hosts.processes(host)
    return {w.worker: w.pid for w in run.of_kind(events.WorkerJoined) if w.pid in there}


def check_fenced(
    run: PartitionRun, cut_s: float, cut_off: dict[str, int], cause: str = "node"
) -> None:
    """The cut-off workers were written off in time, and from then on nothing of the generation
    that they knew was recorded or published."""
    lost = run.of_kind(events.WorkerLost, after_s=cut_s)
    assert {event.worker for event in lost} == set(cut_off)
    assert {event.cause for event in lost} == {cause}
    assert max(event.time for event in lost) - cut_s < NODE_TIMEOUT_S + LATE_S
    fenced_s = lost[0].time
    (first, *_) = run.of_kind(events.RegroupDone, after_s=fenced_s)
    assert {s.generation < first.generation for s in run.steps() if s.time > fenced_s} == {False}
    saves = run.of_kind(events.CheckpointCommitted, after_s=fenced_s)
    assert {save.generation < first.generation for save in saves} == {False}
    store = open_store(run.root / "checkpoints")
    for save in saves:
        assert load_manifest(store, Keys(), save.step).generation == save.generation


def test_a_host_that_is_cut_off_publishes_nothing_and_comes_back(tmp_path: Path) -> None:
    """The lead's host, at that: its worker records the steps and saves."""
    with run_on(tmp_path, hosts=2, replicas=2) as run:
        host = run.under_way()
        cut_off, cut_s = workers_on(run, host), time.time()
        run.hosts.cut(host)
        run.wait_until(lambda: not set(cut_off.values()) & run.hosts.processes(host))
        assert time.time() - cut_s < NODE_TIMEOUT_S + LATE_S
        run.wait_for_replicas(1, after_s=cut_s)
        alone = len(run.steps())
        run.wait_until(lambda: len(run.steps()) > alone + SOME)
        assert not workers_on(run, host)  # the run went on without it
        restored_s = time.time()
        run.hosts.restore(host)
        run.wait_for_replicas(2, after_s=restored_s)
        assert workers_on(run, host).keys().isdisjoint(cut_off)
        run.finish()
        check_fenced(run, cut_s, cut_off)


def test_a_host_that_dies_is_done_without(tmp_path: Path) -> None:
    """Raylet, workers and agent, all at once; then another raylet starts there."""
    with run_on(tmp_path, hosts=2, replicas=2) as run:
        host = run.under_way()
        dead, killed_s = workers_on(run, host), time.time()
        run.hosts.kill(host)
        run.wait_for_replicas(1, after_s=killed_s)
        alone = len(run.steps())
        run.wait_until(lambda: len(run.steps()) > alone + SOME)
        started_s = time.time()
        run.hosts.start(host)
        run.wait_for_replicas(2, after_s=started_s)
        run.finish()
        check_fenced(run, killed_s, dead, "ray_node")  # its kernel lives


def test_a_host_that_is_cut_off_for_good(tmp_path: Path) -> None:
    """So long that Ray gives it up as well: its raylet ends, and another one starts there."""
    with run_on(tmp_path, hosts=2, replicas=2) as run:
        host = run.under_way()
        cut_off, cut_s = workers_on(run, host), time.time()
        run.hosts.cut(host)
        run.wait_for_replicas(1, after_s=cut_s)
        run.wait_until(run.hosts.given_up)
        before = run.hosts.processes(host)
        run.hosts.restore(host)
        run.wait_until(lambda: not before & run.hosts.processes(host))
        started_s = time.time()
        run.hosts.start(host)
        run.wait_for_replicas(2, after_s=started_s)
        run.finish()
        check_fenced(run, cut_s, cut_off)


def test_a_replica_over_two_hosts_loses_one_of_them(tmp_path: Path) -> None:
    """The worker on the other host waits in a collective, which the call ends that its mate is
    lost."""
    with run_on(tmp_path, hosts=2, replicas=1, shard=2) as run:
        host = run.under_way()
        cut_off, cut_s = workers_on(run, host), time.time()
        survivors = workers_on(run, 1 - host)
        run.hosts.cut(host)
        run.wait_until(lambda: not workers_on(run, host))
        run.hosts.restore(host)
        run.wait_for_replicas(1, after_s=cut_s)
        assert workers_on(run, 1 - host) == survivors
        run.finish()
        check_fenced(run, cut_s, cut_off)
