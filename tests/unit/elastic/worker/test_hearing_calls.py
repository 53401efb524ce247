"""A worker hears calls for as long as it is in the run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic.protocol.coordinator_api import UnheardError
from elastic.protocol.messages import Signal
from elastic.worker import coordinator_link as module
from elastic.worker.coordinator_link import CoordinatorLink
from trainer.backend.silence import Connections


@pytest.mark.parametrize(
    ("lost", "says_where_it_stands"),
    [
        (ray.exceptions.RaySystemError("a message was lost"), 0),
        (ray.exceptions.ActorUnavailableError("the coordinator is restarting", None), 1),
        (UnheardError(), 1),
    ],
)
def test_an_error_on_the_way_does_not_end_the_hearing(
    monkeypatch: pytest.MonkeyPatch, lost: Exception, says_where_it_stands: int
) -> None:
    """Else it stays behind a frozen peer until it is ended with it. Whoever was in no call when the
    coordinator was lost hears of that from the next one."""
    answers: list[Any] = [lost, Signal(serial=1, kind="boundary"), None]
    reintroduced: list[int] = []

    def next_call(seen: int) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", lambda answer: answer)
    link: Any = SimpleNamespace(
        _closed=threading.Event(),
        _called={"fault": 0, "boundary": 0},
        _next_call=next_call,
        _reintroduce=lambda: reintroduced.append(len(answers)),
    )
    CoordinatorLink._watch(link)
    assert link._called == {"fault": 0, "boundary": 1}
    assert reintroduced == [2] * says_where_it_stands


class HeardAtOnce(dict[str, int]):
    """The loop hears the call as soon as it is there, leaves its replica and makes the next one."""

    standing = Connections()

    def __setitem__(self, kind: str, serial: int) -> None:
        super().__setitem__(kind, serial)
        self.standing = Connections()


def test_a_call_ends_the_replica_that_stood_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the next one, which may be there when the watch comes to it."""
    called = HeardAtOnce(fault=0, boundary=0)
    former, ended = called.standing, list[Connections | None]()
    answers = [
        Signal(serial=1, kind="fault", broken=True),
        Signal(serial=2, kind="fault", broken=False),
        None,
    ]
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(module, "replica_connections", lambda: called.standing)
    monkeypatch.setattr(module, "abort_groups", lambda *, replica: ended.append(replica))
    link: Any = SimpleNamespace(
        _closed=threading.Event(),
        _called=called,
        _settled=0,
        _save_schedule=SimpleNamespace(failed=lambda: None),
        _next_call=lambda seen: answers.pop(0),
    )
    CoordinatorLink._watch(link)
    assert ended == [former, None] and called.standing is not former
