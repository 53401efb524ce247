"""At the end of the run a worker waits for the upload before, and is seen to wait."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.worker.coordinator_link import CoordinatorLink
from elastic.worker.saver import Saver
from health.heartbeat import Heartbeat, HeartbeatReader
from trainer.loop.phases import PHASES

UNTIL, DEADLINE_S = 9, 30.0


@pytest.mark.parametrize(
    ("called_away", "saved", "begins"),
    [(False, False, True), (False, True, False), (True, False, False)],
    ids=["it lacks the last", "the upload was the last", "a fault calls it away"],
)
def test_an_upload_that_takes_long_at_the_end_is_waited_for(
    called_away: bool, saved: bool, begins: bool
) -> None:
    """In `checkpoint` it would be ended after `regroup_timeout_s`, and all others with it."""
    heartbeat, written = Heartbeat(), threading.Event()
    reader = HeartbeatReader(os.getpid(), heartbeat.fd)
    seen, begun = list[str](), list[int]()

    def note() -> None:
        seen.append(PHASES[reader.read().phase])

    def leave_now() -> bool:
        """Asked while it waits for the upload, which ends then."""
        note()
        written.set()
        return called_away

    def call(method: Any, step: int) -> bool:
        assert method is CoordinatorApi.saved and step == UNTIL
        note()
        return saved

    job: Any = SimpleNamespace(
        coordinator=SimpleNamespace(call=call),
        paths=SimpleNamespace(root=SimpleNamespace(name="run")),
        identity=SimpleNamespace(id="1"),
    )
    nothing: Any = None
    saves: Any = Saver(job, nothing, nothing, nothing, leave_now)
    upload = threading.Thread(target=written.wait, args=[DEADLINE_S], daemon=True)
    saves._writing["store"] = upload, nothing
    upload.start()
    saves.save = lambda run, step, engine, state, places: begun.append(step)
    link: Any = object.__new__(CoordinatorLink)
    link._run, link._heartbeat, link.saves = SimpleNamespace(until=UNTIL), heartbeat, saves

    link.mark(UNTIL, "checkpoint")
    link.save(UNTIL, nothing, {}, ["store"])
    note()
    assert set(seen[:-1]) == {"wait"} and seen[-1] == "checkpoint"
    assert begun == ([UNTIL] if begins else [])
    reader.close()
