"""What tests of one engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.parallel.layout import ParallelDims
from trainer.parallel.mesh import ReplicaMesh


@pytest.fixture
def replica() -> Iterator[tuple[Rendezvous, ReplicaMesh]]:
    """Where newcomers meet their source, and a replica of one worker."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    yield meet, make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
    leave_replica_group()
