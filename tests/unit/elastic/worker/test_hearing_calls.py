"""A worker hears calls for as long as it is in the run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic.protocol.messages import Signal
from elastic.worker.coordinator_link import CoordinatorLink


def test_an_error_on_the_way_does_not_end_the_hearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it stays behind a frozen peer until it is ended with it."""
    answers: list[Any] = [
        ray.exceptions.RaySystemError("a message was lost"),
        Signal(serial=1, kind="boundary"),
        None,
    ]

    def next_call(seen: int) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", lambda answer: answer)
    link: Any = SimpleNamespace(
        _closed=threading.Event(), _called={"fault": 0, "boundary": 0}, _next_call=next_call
    )
    CoordinatorLink._watch(link)
    assert link._called == {"fault": 0, "boundary": 1}
