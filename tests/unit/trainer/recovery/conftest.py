"""What tests of heals share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.healing import make_engine, make_mesh
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.parallel.mesh import ReplicaMesh


@pytest.fixture
def replica() -> Iterator[tuple[Rendezvous, ReplicaMesh]]:
    """Where newcomers meet their source, and a replica of one worker."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    yield meet, make_mesh(meet)
    leave_replica_group()


@pytest.fixture
def pair(replica: tuple[Rendezvous, ReplicaMesh]) -> tuple[Rendezvous, Engine, Engine]:
    """Where they meet, a worker's engine with state and another one's without, in one process."""
    meet, mesh = replica
    giver, taker = make_engine(mesh), make_engine(mesh)
    giver.initialize()
    return meet, giver, taker
