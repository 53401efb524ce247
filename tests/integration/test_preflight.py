"""A machine whose GPU has failed gets no worker, as its checks say before the run; the other one
trains. NVML is a module of the test's, below the same calls as NVIDIA's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from elastic.protocol import events
from elastic.protocol.events import Event
from elastic.reporting.suspect_file import SuspectFile
from tests.integration.test_growth import GrowingRun, joined
from tests.support import ROOT

BROKEN = "ELASTIC_TEST_BROKEN_GPU"
"""Environment variable of the node whose GPU has rows that could not be replaced."""

NVML = f"""
import os
from types import SimpleNamespace

class NVMLError(Exception):
    pass

class NVMLError_GpuIsLost(NVMLError):
    pass

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetPciInfo(handle): return SimpleNamespace(busId="00000000:53:00.0")
def nvmlDeviceGetRemappedRows(handle): return 0, 0, 0, int("{BROKEN}" in os.environ)

def __getattr__(name):
    if name.startswith("NVML_"):
        return 0
    if name.startswith("nvml"):
        def refuse(*_):
            raise NVMLError("not supported")
        return refuse
    raise AttributeError(name)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Cluster, str, str]]:
    """A head without room for workers, and two nodes with room for one each: a well and a broken
    one, by their ids."""
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text(NVML)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        well = cluster.add_node(num_cpus=1)
        broken = cluster.add_node(num_cpus=1, env_vars={BROKEN: "1"})
        yield cluster, well.node_id, broken.node_id
        cluster.shutdown()


@pytest.mark.soak
def test_a_machine_that_has_failed_gets_no_worker(
    machines: tuple[Cluster, str, str], tmp_path: Path
) -> None:
    cluster, well, broken = machines
    run = GrowingRun(cluster, tmp_path, 2, 1, 1, 0)

    def both_known(all_: list[Event]) -> bool:
        return {e.node for e in joined(all_)} == {well, broken} and bool(isolated(all_))

    try:
        run.wait_for(both_known)
        run.wait_for_replicas(1)
        run.finish()
    finally:
        run.close()
    all_ = run.events()
    (checked,) = isolated(all_)
    assert checked.node == broken
    assert checked.isolated == ("GPU errors: 0000:53:00: rows of its memory could not be replaced")
    here = {event.worker for event in joined(all_) if event.node == broken}
    forming = [event for event in all_ if isinstance(event, events.ReplicaForming)]
    assert forming and not any(here & {*event.workers} for event in forming)
    assert not [event for event in all_ if isinstance(event, events.WorkerLost)]
    (marks,) = SuspectFile(tmp_path).read().values()
    assert [mark.cause for mark in marks] == ["preflight"]
    report = (tmp_path / "run" / "report.txt").read_text()
    assert f"node {broken}: no worker works there: GPU errors" in report


def isolated(all_: list[Event]) -> list[events.NodeChecked]:
    return [e for e in all_ if isinstance(e, events.NodeChecked) and e.isolated]
