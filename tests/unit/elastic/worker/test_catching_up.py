"""A worker that missed a commit applies its step, and saves nothing alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.worker.worker import Worker
from trainer.loop.link import Progress
from trainer.replication.step_commit import Commit

COMMIT = Commit(step=4, loss=1.0, grad_norm=1.0, tokens=8, digests=b"", boundary=False)


@pytest.mark.parametrize(("mixed", "done"), [(False, ["step", "evaluation"]), (True, ["step"])])
def test_the_others_have_begun_that_save_in_a_roster_that_is_gone(
    mixed: bool, done: list[str]
) -> None:
    """Its part could never be made whole, and would keep the place from the next one."""
    did = list[str]()
    loop = SimpleNamespace(
        finish_step=lambda commit: did.append("step"),
        evaluate=lambda: did.append("evaluation"),
        save_and_evaluate=lambda: did.append("save"),
    )
    worker: Any = SimpleNamespace(
        progress=Progress(step=4), mixed=mixed, make_loop=lambda *args: loop
    )
    run: Any = SimpleNamespace(commit=COMMIT, restore=False, step=5, until=9)
    cross: Any = None
    Worker.catch_up(worker, run, cross)
    assert did == done
