"""A machine that goes bad slowly: found, left, replaced, and the weights are the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ray.cluster_utils import Cluster

from checkpointing import Keys, Reader, newest, open_store
from elastic.protocol import events
from elastic.protocol.events import Event
from tests.integration.test_growth import GrowingRun, joined, lost
from tests.integration.test_replaced_node import end_node, machines, trains_on
from tests.support import ROOT
from tests.support.data_plane import full_parameters, run_layout
from tests.support.held_back import held_back, requires_quota, throttled_periods
from tests.support.slowed_run import LANES, slowed_train
from tests.support.watching import incidents_of

PROGRAM = ROOT / "tests/support/slowed_run.py"
CORES = 0.15
"""That the slow machine has: less than a third of what it had beside two others on two cores."""
__all__ = ["machines"]


def reference(cache: Path) -> dict[str, bytes]:
    """The weights of the same run in one process, undisturbed."""
    cache.mkdir()
    (cache / "gate").touch()
    train = slowed_train(str(cache / "busy"), str(cache / "gate"))
    workers = run_layout(train.task.prepare(train, str(cache)), train, replicas=1, lanes=LANES)
    return {name: bits(tensor) for name, tensor in full_parameters(workers).items()}


def weights(root: Path) -> dict[str, bytes]:
    """The weights at the end of the run in `root`."""
    store = open_store(root / "checkpoints")
    manifest = newest(store, Keys())
    assert manifest is not None
    reader = Reader(store, manifest)
    names = [name for name in manifest.tensors if name.startswith("param/")]
    return {name.removeprefix("param/"): bits(reader.read_full(name)) for name in names}


def bits(tensor: torch.Tensor) -> bytes:
    """Of all its numbers."""
    return tensor.contiguous().numpy().tobytes()


def of_kind(all_: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in all_ if isinstance(event, kind)]


@pytest.mark.soak
@pytest.mark.timeout(600)  # on a busy machine
@requires_quota
def test_a_machine_that_goes_slow_is_found_left_and_replaced(
    machines: Cluster, tmp_path: Path
) -> None:
    busy = tmp_path / "busy"
    expected = reference(tmp_path / "cache")
    busy.touch()
    before = {node.node_id for node in machines.worker_nodes}
    run = GrowingRun(machines, tmp_path, program=PROGRAM)
    fresh: set[str] = set()
    try:
        slow = joined(run.wait_for_replicas(3))[1]
        with held_back([slow.pid], CORES):
            found = run.wait_for(lambda all_: bool(of_kind(all_, events.StragglersFound)))
            assert throttled_periods() > 0
        busy.unlink()
        happened = run.wait_for(lambda all_: bool({e.node for e in joined(all_)} - before))
        (new,) = fresh = {e.node for e in joined(happened)} - before
        run.wait_for(lambda all_: trains_on(all_, new))
        assert run.finish() and weights(run.root) == expected
        _check_story(run.events(), slow, found)
        _check_evidence(run.root, slow)
        report = json.loads((run.root / "report.json").read_text())
        verdicts = {one["verdict"]["cause"]: one["verdict"] for one in report["verdicts"]}
        assert verdicts["slow"]["nodes"] == [slow.node]
    finally:
        run.close()
        for node in fresh:
            end_node(machines, node)


def _check_story(all_: list[Event], slow: events.WorkerJoined, found: list[Event]) -> None:
    """It was the first that was found, and its machine was left between two steps."""
    told = of_kind(all_, events.StragglersFound)[0]
    assert isinstance(told, events.StragglersFound) and told in found
    assert (told.workers, told.nodes, told.part) == ([slow.worker], [slow.node], "compute")
    begun, done = (e for e in all_ if isinstance(e, events.NodeReplacement))
    assert (begun.outcome, done.outcome, done.node) == ("begun", "replaced", slow.node)
    assert begun.reason.startswith("slow: 1 worker, slow in 5 rounds running")
    assert {(e.worker, e.slot) for e in lost(all_)} <= {(slow.worker, None)}, "it had left"
    assert not [e for e in all_ if isinstance(e, events.RegroupDone) and e.repeated_steps]


def _check_evidence(root: Path, slow: events.WorkerJoined) -> None:
    ((incident, manifest),) = incidents_of(root)
    assert list(manifest["accused"]) == [slow.worker]
    assert (manifest["cause"], manifest["nodes"]) == ("slow", [slow.node])
    assert len(manifest["paces"]) == 3
    paces = {worker: pace["compute_s"] for worker, pace in manifest["paces"].items()}
    assert max(paces, key=lambda worker: paces[worker]) == slow.worker
    assert len(list(incident.glob("*.txt"))) == 3, "its stacks, and those of two others"
