"""A worker that missed a commit applies its step, and neither saves nor evaluates alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastic.worker.worker import Worker
from trainer.loop.link import Progress
from trainer.replication.step_commit import Commit

COMMIT = Commit(step=4, loss=1.0, grad_norm=1.0, tokens=8, digests=b"", boundary=False)


def test_the_others_have_begun_what_is_due_in_a_roster_that_is_gone() -> None:
    """Its part of a save could never be made whole, and would keep the place from the next one; its
    evaluation would keep the others waiting."""
    did = list[str]()
    loop = SimpleNamespace(
        finish_step=lambda commit: did.append("step"),
        save_and_evaluate=lambda: did.append("what is due"),
    )
    worker: Any = SimpleNamespace(
        progress=Progress(step=4),
        make_loop=lambda *args: loop,
        link=SimpleNamespace(mark=lambda step, phase: did.append(f"{phase} of {step}")),
    )
    run: Any = SimpleNamespace(commit=COMMIT, restore=False, step=5, until=9)
    cross: Any = None
    Worker.catch_up(worker, run, cross)
    assert did == ["step", "regroup of 5"], "what comes next is not the optimizer"
