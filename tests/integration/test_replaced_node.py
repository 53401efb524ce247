"""A verdict against a machine: its node is drained, another comes, its worker fills the slot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import _raylet
from ray.cluster_utils import Cluster

from elastic.protocol import events
from elastic.protocol.events import Event
from elastic.reporting.suspect_file import SuspectFile
from tests.integration.test_growth import GrowingRun, joined, lost
from tests.support import ROOT
from tests.support.autoscaling import autoscaled_cluster
from tests.support.watching import incidents_of

PATIENCE_S = 30.0
PROGRAM = ROOT / "tests/support/replaced_node_run.py"


@pytest.fixture
def machines() -> Iterator[Cluster]:
    """A head without room for workers, and three nodes with room for one each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        yield cluster
        cluster.shutdown()


def end_node(cluster: Cluster, node: str) -> None:
    """Ends a node that the cluster has not started."""
    internals: Any = _raylet
    gcs = internals.GcsClient(address=cluster.address)
    gcs.drain_nodes([bytes.fromhex(node)], timeout=PATIENCE_S)


def trains_on(all_: list[Event], node: str) -> bool:
    """Whether three replicas stand, and the one with a worker of `node` has lanes."""
    here = {e.worker for e in joined(all_) if e.node == node}
    formed = [e for e in all_ if isinstance(e, events.ReplicaForming) and here & {*e.workers}]
    *_, roster = (e for e in all_ if isinstance(e, events.RegroupDone))
    lanes = roster.lanes
    return bool(formed) and len(lanes) == 3 and bool(lanes.get(str(formed[-1].replica)))


def nodes(all_: list[Event]) -> set[str]:
    return {e.node for e in joined(all_)}


def replacements(all_: list[Event]) -> list[events.NodeReplacement]:
    return [e for e in all_ if isinstance(e, events.NodeReplacement)]


@pytest.mark.soak
def test_a_machine_with_a_wrong_state_is_replaced(machines: Cluster, tmp_path: Path) -> None:
    before = {node.node_id: node for node in machines.worker_nodes}
    run = GrowingRun(machines, tmp_path, "local", program=PROGRAM)
    fresh: set[str] = set()
    try:
        run.wait_for(lambda all_: any(e.outcome == "replaced" for e in replacements(all_)))
        happened = run.wait_for(lambda all_: bool({e.node for e in joined(all_)} - before.keys()))
        (new,) = fresh = {e.node for e in joined(happened)} - before.keys()
        run.wait_for(lambda all_: trains_on(all_, new))
        run.finish()
        wrong = lost(run.events())[0]  # another worker may have started there before the verdict
        begun, done = replacements(run.events())
        assert (begun.outcome, begun.node, wrong.cause) == ("begun", wrong.node, "corruption")
        assert done.detail == "another Ray node with 1 CPUs was started on this machine"
        wrote = {
            Path(log).name for e in joined(run.events()) if e.node == wrong.node for log in e.logs
        }
        kept = {path.name for path in (run.root / "logs" / wrong.node).iterdir()}
        assert kept == wrote and kept
        ((incident, _),) = incidents_of(run.root)
        assert (incident / f"{wrong.worker}.log").exists()
        raylet: Any = before[wrong.node].all_processes["raylet"][0].process
        assert raylet.wait(PATIENCE_S) == 0
        assert SuspectFile(tmp_path).read() == {}
    finally:
        run.close()
        for node in fresh:  # the others are the cluster's to end
            end_node(machines, node)


@pytest.mark.slow
def test_rays_autoscaler_brings_a_machine_for_the_one_that_is_replaced(tmp_path: Path) -> None:
    """It has started all of them: nobody else brings a node. One more than the run needs, so that
    the successor comes before the machine at fault is left."""
    with autoscaled_cluster(least=3, most=4) as cluster:
        run = GrowingRun(cluster, tmp_path, "ray", program=PROGRAM)
        try:
            happened = run.wait_for(lambda all_: bool(lost(all_)))
            before = {e.node for e in joined(happened)}
            run.wait_for(lambda all_: any(e.outcome == "replaced" for e in replacements(all_)))
            run.wait_for(lambda all_: any(trains_on(all_, new) for new in nodes(all_) - before))
            run.finish()
            wrong = lost(run.events())[0]
            begun, done = replacements(run.events())
            assert (begun.outcome, begun.node, begun.machine) == ("begun", wrong.node, wrong.node)
            assert done.detail.startswith("its Ray node was ended")
            assert wrong.node not in cluster.living_nodes()
        finally:
            run.close()
