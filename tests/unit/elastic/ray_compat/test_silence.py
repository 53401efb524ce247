"""Workers that have been started and do not say hello."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.ray_compat import workers as module
from elastic.ray_compat.placement import SILENT_S, TOLD_S, Silence
from elastic.ray_compat.workers import ElasticWorkerGroup


class Started:
    """A group of workers whose launches are their processes, and what the coordinator says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.launches = 100.0, [1, 2, 3]
        self.spoken: set[int] | Exception | None = set()
        self.asked: list[list[int]] = []
        self.written: list[tuple[object, ...]] = []
        self.group = object.__new__(ElasticWorkerGroup)
        self.group._silence, self.group._coordinator = Silence(), self  # type: ignore[assignment]
        monkeypatch.setattr(self.group, "get_workers", self._workers)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def _workers(self) -> list[Any]:
        return [
            SimpleNamespace(
                launch=one,
                metadata=SimpleNamespace(node_id=f"n{one}", node_ip=f"10.0.0.{one}", pid=one),
            )
            for one in self.launches
        ]

    def call(
        self, what: object, workers: list[tuple[str, int]], *more: float
    ) -> list[tuple[str, int]] | None:
        if what is CoordinatorApi.ended_silent:
            self.written.append((workers, *more))
            return None
        self.asked.append([pid for _, pid in workers])
        if isinstance(self.spoken, Exception):
            raise self.spoken
        return None if self.spoken is None else [w for w in workers if w[1] not in self.spoken]

    def ended_after(self, seconds: float) -> list[int]:
        self.now_s += seconds
        return [self.launches[at] for at in self.group.silent()]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


def test_one_that_never_says_hello_is_told_of_with_its_node_and_then_ended(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    assert started.ended_after(0.0) == [] and started.ended_after(TOLD_S) == []
    assert started.asked == [] and not caplog.records, "they import"
    started.spoken = {1, 3}
    assert started.ended_after(1.0) == [] and started.ended_after(1.0) == []
    assert started.asked == [[1, 2, 3], [2]], "who has spoken is asked for no more"
    (told,) = caplog.messages
    assert told.startswith(f"1 workers have not said hello {TOLD_S:g} s after they were started")
    assert told.endswith("process 2 on node n2 (10.0.0.2)")
    started.launches = [3, 2]
    assert started.ended_after(SILENT_S - TOLD_S - 3.0) == [] and started.written == []
    assert started.ended_after(2.0) == [2]
    assert started.written == [([("n2", 2)], SILENT_S)]
    assert "ended now" in caplog.messages[-1] and "process 2 on" in caplog.messages[-1]


def test_one_that_is_started_in_its_place_has_its_own_time(started: Started) -> None:
    started.ended_after(0.0)
    started.launches = [4]
    assert started.ended_after(SILENT_S) == []
    assert started.ended_after(SILENT_S + 1.0) == [4]


@pytest.mark.parametrize("says", [None, ActorDiedError()])
def test_while_the_coordinator_does_not_know_nobody_is_ended(
    started: Started, caplog: pytest.LogCaptureFixture, says: Exception | None
) -> None:
    caplog.set_level(logging.INFO)
    started.spoken = says
    assert started.ended_after(0.0) == [] and started.ended_after(2 * SILENT_S) == []
    assert started.asked == [[1, 2, 3]] and not caplog.records
    started.spoken = {1, 2, 3}
    assert started.ended_after(1.0) == []
