"""What a controller that is started anew makes of its workers' answers; without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from elastic.ray_compat import workers
from elastic.ray_compat.workers import ask_all

RESET = ActorUnavailableError("RPC error: Socket closed", None)
DIED = ActorDiedError()
LATE = GetTimeoutError()


class Asked:
    """A worker that answers both calls alike: in its turn, with each of `answers`."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.get_metadata = self.execute = SimpleNamespace(remote=lambda *_: self)
        """The call is the worker itself here."""

    def take(self) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(calls: list[Asked], num_returns: int, timeout: float) -> None:
        assert len(calls) == num_returns

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda two, timeout: [two[0].take(), 0])


def test_a_worker_whose_connection_is_reset_or_that_is_silent_for_long_is_no_dead_one() -> None:
    """A supervisor that ends healthy workers costs more than the one that was lost."""
    actors = {
        "reset": Asked(RESET, RESET, 1),
        "busy": Asked(LATE, LATE, LATE, 2),
        "died": Asked(DIED),
    }
    assert ask_all(actors, silent_s=60.0) == {"reset": [1, 0], "busy": [2, 0], "died": DIED}


def test_a_worker_is_waited_for_no_longer_than_it_may_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_ANSWER_S", 0.0)
    actors = {"reset": Asked(RESET), "frozen": Asked(LATE)}
    assert ask_all(actors, silent_s=0.0) == {"reset": RESET, "frozen": LATE}
