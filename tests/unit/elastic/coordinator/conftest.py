"""For all tests of the coordinator's parts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.coordinator import run_log
from elastic.reporting.event_log import EventLog


@pytest.fixture(autouse=True)
def _records_are_closed() -> Iterator[None]:
    """Most tests leave their run at some point of it: its files are not left to the collector.
    They are closed after the test's own patches of the storage are undone."""
    logs: list[EventLog] = []

    class Log(EventLog):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            logs.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_log, "EventLog", Log)
        yield
    for log in logs:
        log.close()


@pytest.fixture(autouse=True)
def _garbage_is_collected() -> Iterator[None]:
    """The dispatcher puts it off for longer than most loops here last."""
    yield
    gc.enable()
