"""A build beside the steps that fails says so, whatever was raised."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest

from elastic.worker.side_build import SideBuild

PATIENCE_S = 30.0


@pytest.mark.parametrize("error", [ValueError, SystemExit, BaseException])
def test_what_is_raised_is_told(error: type[BaseException]) -> None:
    told: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()

    def build(leave_now: Callable[[], bool]) -> Any:
        raise error("no such layer")

    answer: Any = None
    beside = SideBuild(answer, build, lambda: told.put(("done",)), lambda *f: told.put(f))
    what, origin = told.get(timeout=PATIENCE_S)
    assert f"{error.__name__}: no such layer" in what and origin == "code"
    beside.close()
