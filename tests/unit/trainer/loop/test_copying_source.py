"""A worker whose state is being copied changes it no sooner than that is done, and says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.data_plane import make_engine, make_lone_loop
from tests.support.healing import DEADLINE_S
from tests.support.member import small_task, small_train
from tests.support.quiet_link import QuietLink
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.engine.host_copy import HostBuffer
from trainer.loop.clock import Part
from trainer.loop.phases import Phase
from trainer.loop.steps import TrainLoop
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import Meeting
from trainer.recovery.staging import Stage
from trainer.recovery.state_blocks import Block
from trainer.replication.step_commit import Place

STEPS = 2


@dataclass
class Telling(QuietLink):
    """Keeps the phases, and lets the copy go on once it is waited for."""

    opened: threading.Event = field(default_factory=threading.Event)
    phases: list[Phase] = field(default_factory=list)

    def at_step(self, step: int, phase: Phase) -> None:
        self.phases.append(phase)
        if phase == "heal_source":
            self.opened.set()


@dataclass
class Saving(Telling):
    """Saves once, and lets the copy go on once it is waited for."""

    loop: TrainLoop | None = None
    begun: bool = False
    parts: list[Part] = field(default_factory=list)
    """Of the clock, where its copy was waited for."""

    def at_step(self, step: int, phase: Phase) -> None:
        self.phases.append(phase)
        if phase == "checkpoint" and self.begun:
            assert self.loop is not None
            self.parts.append(self.loop.clock._step.marks[-1].part)
            self.opened.set()

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        if not self.begun:
            share = engine.state.share(0, 1)
            engine.state.copy_to(HostBuffer(share.size_bytes, engine.device), share)
            self.begun = True


def make_loop(
    port: int, link: Telling, *, heals: bool = False, save_every: int | None = None
) -> TrainLoop:
    """Of a worker alone."""
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    engine = make_engine(0, meet, small_task(), small_train(STEPS), replicas=1)
    meeting = Meeting(rendezvous=meet, prefix="heal", secret=b"secret", newcomers=1)
    source = Source(engine, 0, meeting) if heals else None
    return make_lone_loop(meet, engine, link, until=STEPS, save_every=save_every, source=source)


def test_it_is_not_in_its_optimizer_while_its_state_is_copied(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newcomers have no lanes, and wait for it in the sum: it would be taken for stuck."""
    link, copy = Telling(), Stage.copy

    def gated(self: Stage, block: Block, into: torch.Tensor) -> None:
        assert link.opened.wait(DEADLINE_S)
        copy(self, block, into)

    monkeypatch.setattr(Stage, "copy", gated)
    loop = make_loop(port, link, heals=True)
    assert loop.run() == "finished"
    assert loop.source is not None
    loop.source.close()
    loop.cross.close()
    first = link.phases.index("optimizer")
    assert link.phases[first : first + 3] == ["optimizer", "heal_source", "optimizer"]
    assert link.phases.count("heal_source") == 1, "the copy was there before the second step"


def test_nor_is_it_while_a_save_is_copied(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is as long as it is, whatever a step takes. Nor is that time its own: it would be
    taken for slow."""
    link, copy = Saving(), torch._foreach_copy_

    def gated(*arguments: Any) -> None:
        if threading.current_thread().name.startswith("save copy"):
            assert link.opened.wait(DEADLINE_S)
        copy(*arguments)

    monkeypatch.setattr(torch, "_foreach_copy_", gated)
    link.loop = make_loop(port, link, save_every=1)
    assert link.loop.run() == "finished"
    link.loop.cross.close()
    second = link.phases.index("optimizer", link.phases.index("checkpoint"))
    assert link.phases[second : second + 3] == ["optimizer", "checkpoint", "optimizer"]
    assert link.parts[0] == "save"
    assert link.phases.count("checkpoint") == 3, "two saves, and the copy that was waited for"
