"""A worker whose state goes to newcomers changes it no sooner than it is copied, and says so."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch

from tests.support.data_plane import make_engine
from tests.support.healing import DEADLINE_S
from tests.support.member import small_task, small_train
from tests.support.quiet_link import QuietLink
from trainer.backend.rendezvous import Rendezvous
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.phases import Phase
from trainer.loop.steps import TrainLoop
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import Meeting
from trainer.recovery.staging import Stage
from trainer.recovery.state_blocks import Block
from trainer.replication.replicas import CrossGroup

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


def test_it_is_not_in_its_optimizer_while_its_state_is_copied(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newcomers have no lanes, and wait for it in the sum: it would be taken for stuck."""
    link, copy = Telling(), Stage.copy

    def gated(self: Stage, block: Block, into: torch.Tensor) -> None:
        assert link.opened.wait(DEADLINE_S)
        copy(self, block, into)

    monkeypatch.setattr(Stage, "copy", gated)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    engine = make_engine(0, meet, small_task(), small_train(STEPS), replicas=1)
    cross = CrossGroup(
        meet, "cross", lanes=[(0, 1)], total_lanes=2, rank=0, device="cpu",
        leave_now=lambda: False,
    )  # fmt: skip
    source = Source(
        engine, 0, Meeting(rendezvous=meet, prefix="heal", secret=b"secret", newcomers=1)
    )
    loop = TrainLoop(
        engine,
        cross,
        engine.make_sums(2, 1),
        lanes=(0, 1),
        progress=Progress(),
        config=LoopConfig(
            lanes=2, save_every=None, compare_every=None, max_nonfinite_steps=1, until=STEPS
        ),
        link=link,
        source=source,
    )
    assert loop.run() == "finished"
    source.close()
    cross.close()
    first = link.phases.index("optimizer")
    assert link.phases[first : first + 3] == ["optimizer", "heal_source", "optimizer"]
    assert link.phases.count("heal_source") == 1, "the copy was there before the second step"
