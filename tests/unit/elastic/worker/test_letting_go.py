"""A worker that lets go of its replica, or of everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.worker import worker as module
from elastic.worker.worker import Worker
from trainer.loop.link import Progress


class Former:
    """An engine whose replica has broken."""

    def let_go_of_model(self) -> None:
        """See `Engine`."""


def worker_on(device: str, progress: Progress | None) -> Any:
    """One with a place in a replica."""
    engine = Former()
    worker: Any = SimpleNamespace(
        job=SimpleNamespace(scaling=SimpleNamespace(device=device)),
        engine=engine,
        link=SimpleNamespace(injection=SimpleNamespace(engine=engine)),
        progress=progress,
        position=progress,
        built=1,
        given_up=None,
        give_up_beside=lambda: None,
    )
    worker.leave_replica = lambda: Worker.leave_replica(worker)
    return worker


@pytest.mark.parametrize(
    ("device", "free_bytes", "ends"),
    [("cpu", 0, ["group"]), ("cuda", 0, ["group", "cache"]), ("cuda", 1 << 30, ["group"])],
)
def test_the_allocator_gives_back_what_a_model_had_where_nccl_needs_it(
    device: str, free_bytes: int, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the group's end: before, it would wait for what the group has on the device."""
    did = list[str]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 80 << 30))
    monkeypatch.setattr(module, "leave_replica_group", lambda: did.append("group"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("cache"))
    worker = worker_on(device, Progress(step=4))
    Worker.leave_replica(worker)
    assert did == ends
    assert worker.engine is worker.link.injection.engine is not None


def test_nothing_holds_what_is_dropped_while_another_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "leave_replica_group", lambda: None)
    worker = worker_on("cpu", Progress(step=4))
    Worker.drop(worker)
    assert worker.engine is worker.link.injection.engine is worker.progress is None
