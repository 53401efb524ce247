"""A path between two hosts that loses large packets. The workers' test of their connections names
it; and a run over it, in which nobody dies and all wait, goes on without one of them. A host that
gets no large packets is left, also where its replica lies on it and another.
"""

from __future__ import annotations

import ast
import sys
import time
from pathlib import Path

import pytest

from elastic.protocol import events
from tests.support import ROOT
from tests.support.black_hole import dig_black_hole
from tests.support.hosts import Network, ip_of, requires_hosts, why_no_hosts
from tests.support.run_on_hosts import PATIENCE_S, run_on
from tests.support.watching import incidents_of, wait_until
from trainer.backend.link_exchange import LINK_BYTES

TRY = ROOT / "tests/support/links_over_hosts.py"
RUN = ROOT / "tests/support/black_hole_run.py"
BOUND_S = 3.0
MOST_REGROUPS = 4
"""One, without the worker that is taken out, where the agents have seen it while all waited; on a
busy machine two before it, after collectives that have failed, or a test that is cut short."""
EARLY_S = 1.0
"""A standstill is found then before the kernel gives up a connection that nobody acknowledges."""
SOME = 20
"""Steps that show that the run goes on."""

pytestmark = requires_hosts


def test_the_two_ends_of_a_black_hole_name_each_other(tmp_path: Path) -> None:
    """They can connect, and small packets pass."""
    size = 3
    with Network(size) as network:
        dig_black_hole(network, 1, 2)
        logs = [tmp_path / str(rank) for rank in range(size)]
        for rank, log in enumerate(logs):
            numbers = [str(rank), str(size), ip_of(0), str(BOUND_S)]
            network.popen(rank, [sys.executable, str(TRY), *numbers], log)
        wait_until(lambda: all("found {" in log.read_text() for log in logs))
        found = [ast.literal_eval(log.read_text().partition("found ")[2]) for log in logs]
    assert [list(short) for short in found] == [[], [2], [1]]
    for short in found[1:]:
        (came,) = short.values()
        assert 0 < came < LINK_BYTES


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.soak
@pytest.mark.parametrize("hosts", [3, 2])
def test_one_end_of_a_black_hole_is_taken_out(tmp_path: Path, hosts: int) -> None:
    """Of two replicas the one that leads stays. A spare on a third host takes the place of the
    other; where there is none, the worker that starts on the same host does not. The weights are
    those of an undisturbed run."""
    with run_on(tmp_path, hosts=hosts, replicas=2, program=RUN) as run:
        lead = run.under_way()
        (other,) = run.hosts_of(1)
        ends = [r.workers[0] for r in run.of_kind(events.ReplicaForming)]
        dug = time.time()
        dig_black_hole(run.hosts, lead, other)
        run.wait_until(lambda: bool(run.of_kind(events.WorkerLost)))
        (lost,) = run.of_kind(events.WorkerLost)
        assert (lost.cause, lost.slot) == ("path", "replica 1 shard 0 tensor 0")
        if hosts == 3:
            run.wait_for_replicas(2, after_s=lost.time)
        else:
            run.wait_until(lambda: bool(run.of_kind(events.WorkerJoined, after_s=lost.time)))
            recorded = len(run.steps())
            run.wait_until(lambda: len(run.steps()) > recorded + SOME)
            assert not run.of_kind(events.ReplicaForming, after_s=lost.time)
        run.finish()
        assert run.of_kind(events.WorkerLost) == [lost]
        (tested,) = run.of_kind(events.LinksTested)
        assert (tested.removed, tested.count, len(tested.failed)) == ([lost.worker], 2, 2)
        for text in (*tested.failed, lost.detail):
            assert all(worker in text for worker in ends), (text, ends)
        called = [e for e in run.of_kind(events.RegroupCalled, after_s=dug) if e.reason == "fault"]
        assert len(called) <= MOST_REGROUPS


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.soak
@pytest.mark.skipif(why_no_hosts(lossy=True) is not None, reason="loss needs nft")
@pytest.mark.parametrize("first", ["standstill", "error"])
def test_the_node_of_a_replica_that_gets_no_large_packets_is_left(
    tmp_path: Path, first: str
) -> None:
    """Its replica waits in a collective of its own, where nothing tells the two workers apart,
    until somebody finds that no step comes; or, where that takes longer, until the kernel gives up
    a connection, of whichever worker. The other one keeps its state, and a spare on a fifth host
    takes the place. The weights are those of an undisturbed run."""
    patience_s = EARLY_S if first == "standstill" else PATIENCE_S
    with run_on(tmp_path, hosts=5, replicas=2, shard=2, program=RUN, more=[str(patience_s)]) as run:
        lead = run.under_way()
        hosts = run.hosts_of(1)
        assert len({*hosts, *run.hosts_of(0)}) == 4
        bad = next(rank for rank in (1, 0) if hosts[rank] != lead)
        run.hosts.lose(hosts[bad], 'iifname != "lo" meta length > 1000')
        run.wait_until(lambda: bool(run.of_kind(events.WorkerLost)))
        (lost,) = run.of_kind(events.WorkerLost)
        assert (lost.cause, lost.slot) == ("link", f"replica 1 shard {bad} tensor 0")
        run.wait_for_replicas(2, after_s=lost.time)
        run.finish()
        assert run.of_kind(events.WorkerLost) == [lost]
        (tested,) = run.of_kind(events.LinksTested)
        assert tested.removed == [lost.worker]
        kept = [manifest for _, manifest in incidents_of(run.root)]
        assert len(kept) == (first == "standstill")
        for ends in (manifest["failed_links"] for manifest in kept):
            assert ends and all(lost.worker in (end["sender"], end["receiver"]) for end in ends)
