"""A machine whose GPU has failed, or that multiplies wrongly, gets no worker, as its checks say
before the run; the other one trains. NVML is a module of the test's, below the same calls as
NVIDIA's. The wrong bit is put into torch's products, in the process that burns the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from elastic.protocol import events
from elastic.protocol.events import Event
from elastic.reporting.suspect_file import SuspectFile
from tests.integration.test_growth import GrowingRun, joined
from tests.support import ROOT

LOADED = ROOT / "tests/support/loaded_run.py"

BROKEN = "ELASTIC_TEST_BROKEN_GPU"
"""Environment variable of the node whose GPU has rows that could not be replaced."""

NVML = f"""
import os
from types import SimpleNamespace

class NVMLError(Exception):
    pass

class NVMLError_GpuIsLost(NVMLError):
    pass

class NVMLError_ResetRequired(NVMLError):
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

BENT = "ELASTIC_TEST_BENT"
"""Environment variable of the node that gets one bit of a product wrong."""

SITE = f"""
import os, sys

if "{BENT}" in os.environ and "elastic.doctor.loads.burn" in sys.orig_argv:
    import torch

    sound, calls = torch.matmul, []

    def bent(left, right):
        product = sound(left, right)
        calls.append(1)
        if len(calls) == 5:
            product.view(torch.int32)[17, 3] ^= 1
        return product

    torch.matmul = bent
"""


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Cluster, str, str]]:
    """A head without room for workers, and two nodes with room for one each: a well and a broken
    one, by their ids. The parameter: module and its text, and the variable of the broken one."""
    module, text, variable = request.param
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / module).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        well = cluster.add_node(num_cpus=1)
        broken = cluster.add_node(num_cpus=1, env_vars={variable: "1"})
        yield cluster, well.node_id, broken.node_id
        cluster.shutdown()


@pytest.mark.soak
@pytest.mark.parametrize("machines", [("pynvml.py", NVML, BROKEN)], indirect=True, ids=["gpu"])
def test_a_machine_that_has_failed_gets_no_worker(
    machines: tuple[Cluster, str, str], tmp_path: Path
) -> None:
    cluster, _, broken = machines
    all_ = the_well_one_trains(GrowingRun(cluster, tmp_path, 2, 1, 1, 0), machines)
    why = "GPU errors: 0000:53:00: rows of its memory could not be replaced"
    nobody_works_on(broken, all_, tmp_path, why)


@pytest.mark.soak
@pytest.mark.parametrize("machines", [("sitecustomize.py", SITE, BENT)], indirect=True, ids=["bit"])
def test_a_machine_with_a_wrong_bit_gets_no_worker(
    machines: tuple[Cluster, str, str], tmp_path: Path
) -> None:
    cluster, well, broken = machines
    all_ = the_well_one_trains(GrowingRun(cluster, tmp_path, program=LOADED), machines)
    (checked,) = isolated(all_)
    wrong, of = map(int, re.findall(r"cpu: (\d+) of (\d+) products wrong", checked.isolated)[0])
    assert wrong == 1 and of >= 8
    nobody_works_on(broken, all_, tmp_path, checked.isolated)
    loads = [e for e in all_ if isinstance(e, events.NodeChecking) and e.node == well]
    assert [e.check for e in loads] == ["matrix burn", "host to GPU", "all-reduce in the node"]
    sound = [e.time for e in all_ if isinstance(e, events.NodeChecked) and e.node == well]
    forming = [e.time for e in all_ if isinstance(e, events.ReplicaForming)]
    assert max(e.time for e in loads) <= sound[0] <= forming[0]


def the_well_one_trains(run: GrowingRun, machines: tuple[Cluster, str, str]) -> list[Event]:
    """Waits until both machines were looked at, and for the end. Returns what happened."""
    _, well, broken = machines

    def both_known(all_: list[Event]) -> bool:
        return {e.node for e in joined(all_)} == {well, broken} and bool(isolated(all_))

    try:
        run.wait_for(both_known)
        run.wait_for_replicas(1)
        run.finish()
    finally:
        run.close()
    return run.events()


def nobody_works_on(broken: str, all_: list[Event], storage: Path, why: str) -> None:
    (checked,) = isolated(all_)
    assert (checked.node, checked.isolated) == (broken, why)
    here = {event.worker for event in joined(all_) if event.node == broken}
    forming = [event for event in all_ if isinstance(event, events.ReplicaForming)]
    assert forming and not any(here & {*event.workers} for event in forming)
    assert not [event for event in all_ if isinstance(event, events.WorkerLost)]
    (marks,) = SuspectFile(storage).read().values()
    assert [mark.cause for mark in marks] == ["preflight"]
    report = (storage / "run" / "report.txt").read_text()
    assert f"node {broken}: no worker works there: {why}" in report


def isolated(all_: list[Event]) -> list[events.NodeChecked]:
    return [e for e in all_ if isinstance(e, events.NodeChecked) and e.isolated]
