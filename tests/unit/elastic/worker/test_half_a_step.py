"""A worker whose optimizer has raised holds the state of no step, whoever was lost at that time."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.protocol.causes import OUT_OF_MEMORY
from elastic.worker.worker import Worker
from trainer.loop.link import Progress
from trainer.loop.steps import TrainLoop
from trainer.replication.step_commit import Commit

COMMIT = Commit(step=4, loss=1.0, grad_norm=1.0, tokens=8, digests=b"", boundary=False)
STATE = SimpleNamespace(copies=False)


def raises(step: int, *, scale: float) -> None:
    raise MemoryError


def apply(engine: Any) -> Progress:
    """What the loop has noted of a step that `engine` applies."""
    loop: Any = object.__new__(TrainLoop)
    loop.progress, loop.source, loop.enter = Progress(step=4), None, lambda step, phase: None
    loop.train = SimpleNamespace(optimizer=SimpleNamespace(clip_norm=1.0))
    loop.engine = engine
    with contextlib.suppress(MemoryError):
        loop.apply(COMMIT)
    progress: Progress = loop.progress
    return progress


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (SimpleNamespace(apply=lambda step, scale: None, state=STATE), "joins again"),
        (SimpleNamespace(apply=raises, state=STATE), "exits"),
    ],
)
def test_it_exits_where_the_optimizer_has_raised(engine: Any, expected: str) -> None:
    done: list[str] = []
    worker: Any = SimpleNamespace(
        progress=apply(engine),
        link=SimpleNamespace(
            mark=lambda step, phase: done.append(f"{phase} of {step}"),
            trouble=lambda step, detail, cause: True,  # a peer is lost as well
        ),
        leave_replica=lambda: done.append("joins again"),
        exit=lambda detail: done.append("exits"),
    )
    Worker.recover(worker, "MemoryError", OUT_OF_MEMORY)
    assert done == ["regroup of 4", expected], "it does not stand still in its step"
