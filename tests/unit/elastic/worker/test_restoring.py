"""A worker that cannot read a saved state says so, also where its peers did not wait for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from checkpointing import CheckpointError, S3Config, StoreUnavailableError
from elastic.config import HealthConfig
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.run_paths import RunPaths
from elastic.worker.restoring import restore
from tests.support.cross_pair import join_pair
from tests.support.restore_plane import task
from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.parallel.layout import ParallelDims, Slot
from trainer.replication.replicas import CrossGroup


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def meet() -> Iterator[Rendezvous]:
    """Where groups meet."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=server.port, timeout_s=60)
    leave_replica_group()


def alone_of_two(meet: Rendezvous) -> CrossGroup:
    """The group of a worker whose peer has left by the first collective."""
    peer = threading.Thread(target=lambda: join_pair(meet, 1).close())
    peer.start()
    cross = join_pair(meet, 0)
    peer.join()
    return cross


@pytest.mark.timeout(60)  # unbounded, the store would be waited for for ten minutes
@pytest.mark.parametrize("source", ["store", "memory"])
def test_what_it_met_is_told_where_the_peers_have_waited_too_long(
    source: str, silent: str, meet: Rendezvous, tmp_path: Path
) -> None:
    told: list[CheckpointError] = []

    def call(method: Any, *arguments: Any) -> None:
        if method is CoordinatorApi.checkpoint_failed:
            told.append(arguments[-1])
        else:
            assert method is CoordinatorApi.snapshot, "it may lie on another node, too"

    place = S3Config(url="s3://bucket/run", region="us-east-1", endpoint_url=silent)
    job: Any = SimpleNamespace(
        paths=RunPaths(root=tmp_path, store=place),
        health=HealthConfig(collective_timeout_s=2.0),
        coordinator=SimpleNamespace(call=call),
    )
    run: Any = SimpleNamespace(step=20, source=source, generation=1)
    identity: Any = SimpleNamespace(worker="w0", node="n0")
    mesh = make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
    slot = Slot(replica=0, rank=0, dims=ParallelDims())
    train = TrainConfig(task=task(), steps=30, global_batch=2)
    engine = Engine(task(), train, slot=slot, mesh=mesh, device="cpu", max_replicas=2)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "of-the-tests")
        cross = alone_of_two(meet)
        assert restore(job, run, engine, cross, identity) is None
    assert [type(error) for error in told] == [StoreUnavailableError] * (source == "store")
