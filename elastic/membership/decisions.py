"""What membership needs to know of the run's sizes, and what it decides. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elastic.protocol.events import RegroupReason
from elastic.protocol.messages import Answer, Signal
from elastic.protocol.roster import Replica, Roster
from trainer.parallel.layout import ParallelDims
from trainer.replication.step_commit import Saving

Outcome = Literal["start", "repeat", "finish_step", "boundary", "restore"]


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """The sizes that membership needs to know."""

    max_replicas: int
    """Most replicas of the run."""
    min_replicas: int
    """Fewest to train with."""
    dims: ParallelDims
    """The mesh of each replica."""
    lanes: int
    """Lanes of the run."""
    steps: int
    """Steps of the run."""
    start_workers: int
    """Workers to wait for at the start, so that neighbours end up in one replica."""
    max_regroups_without_progress: int
    """As in `HealthConfig`."""

    @property
    def workers_per_replica(self) -> int:
        """Workers in each replica."""
        return self.dims.workers


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A new roster stands."""

    roster: Roster
    """It."""
    step: int
    """Where everybody goes on."""
    outcome: Outcome
    """What became of the interrupted step."""
    saving: Saving
    """What the last commit said of saving the state there."""
    lost_steps: int
    """Committed steps that must be done again."""
    renumbered: dict[int, int]
    """Number under which a successor formed -> that of the replica that left, which it has now."""


@dataclass(kw_only=True)
class Effects:
    """What `Membership.advance` asks the coordinator to do."""

    answers: dict[str, Answer] = field(default_factory=dict)
    """Worker waiting in join -> its answer."""
    signals: dict[str, Signal] = field(default_factory=dict)
    """Working worker -> call."""
    called: RegroupReason | None = None
    """A regroup was called just now, and why."""
    formed: list[Replica] = field(default_factory=list)
    """Replicas that began to form."""
    refused: dict[str, str] = field(default_factory=dict)
    """Worker that gets no place for its versions -> why."""
    regrouped: Regrouped | None = None
    """The roster that came of it."""
    short_of: int = 0
    """Workers missing to reach `min_replicas`, while everybody waits for them."""
