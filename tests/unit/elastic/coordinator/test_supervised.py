"""The end of a run whose supervisor is gone for good; without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic import HealthConfig
from elastic.coordinator import supervised
from elastic.coordinator.supervised import Supervised
from elastic.protocol.events import RunEnded
from elastic.reporting.event_log import read_events
from tests.support.coordinator_desk import CoordinatorDesk


def test_what_is_left_of_the_run_is_ended_as_often_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would, and placement groups hold machines."""
    refusals, left, ended = [ConnectionError("Ray is away")], asyncio.Event(), list[str]()

    def end_all(prefix: str) -> None:
        if refusals:
            raise refusals.pop()
        ended.append(prefix)

    monkeypatch.setattr(supervised, "end_actors", ended.append)
    monkeypatch.setattr(supervised, "end_all", end_all)
    monkeypatch.setattr(supervised, "end_own_actor", left.set)
    health = HealthConfig(supervisor_timeout_s=0.05)

    async def play() -> None:
        desk = CoordinatorDesk(tmp_path, health=health)
        Supervised(desk.config, desk.dispatcher, desk.records).begin()
        await asyncio.wait_for(left.wait(), 20.0)
        end = read_events(desk.paths.events)[-1]
        assert isinstance(end, RunEnded) and end.outcome == "failed" and not refusals
        supervisor = desk.paths.key  # it may be frozen, and its name and lock would stay
        assert ended[-3:] == [supervisor, supervisor, desk.config.prefix]

    asyncio.run(play())
