"""What the coordinator needs to know about the run."""

from __future__ import annotations

from dataclasses import dataclass

from checkpointing import CheckpointConfig, Snapshot
from elastic.config import HealthConfig
from elastic.membership.decisions import GroupConfig
from elastic.protocol import events
from elastic.protocol.faults import Fault
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from trainer.loop.samples import Ledger


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """What the coordinator needs to know about the run."""

    groups: GroupConfig
    """Sizes."""
    paths: RunPaths
    """Where the records go."""
    identity: RunIdentity
    """What stands in the run directory: another one, or none, is not this run's."""
    prefix: str
    """The names of all that belongs to this start of the run begin with it."""
    health: HealthConfig
    """Bounds and budgets."""
    checkpoint: CheckpointConfig
    """Retention."""
    generation: int
    """The last generation that anything was written under."""
    restore_step: int
    """Step of the newest checkpoint; 0 without one."""
    snapshot: Snapshot | None
    """A newer state that an earlier start left in the nodes' memory."""
    started: events.RunStarted
    """The run's first event."""
    faults: tuple[Fault, ...]
    """Faults to inject."""
    ledger: Ledger
    """Which samples each step must take."""
    reads: tuple[str, ...] = ()
    """Files that each worker's machine must see: of the run, and of its data."""

    @property
    def in_memory(self) -> bool:
        """Whether snapshots are taken."""
        return self.checkpoint.memory_every is not None

    @property
    def slots(self) -> int:
        """Workers of the full layout, spares not counted."""
        return self.groups.max_replicas * self.groups.workers_per_replica
