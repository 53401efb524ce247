"""What the trainer's tests share: a store at which process groups meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store; the replica that met there is left at the end."""
    import torch.distributed as dist  # not for tests without it

    from trainer.backend.groups import leave_replica_group

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    leave_replica_group()
