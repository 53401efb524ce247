"""What every worker of a run is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from checkpointing import CheckpointConfig
from elastic.config import HealthConfig, ScalingConfig
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.faults import Fault
from elastic.protocol.rpc import Remote
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from trainer.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked run, as it crosses to the workers."""

    train: TrainConfig
    """What to learn; its `task` is left out, `task` below is the prepared one."""
    task: Any
    """The prepared task."""
    lanes: int
    """Lanes of the run."""
    scaling: ScalingConfig
    """Sizes and the device."""
    checkpoint: CheckpointConfig
    """When to save."""
    health: HealthConfig
    """Bounds."""
    paths: RunPaths
    """The run directory."""
    identity: RunIdentity
    """Who the run is; it stands in every checkpoint."""
    attempt: int
    """Random number of this start, in the keys of all it saves: no other start writes there."""
    secret: bytes = field(repr=False)
    """Random bytes of this start, by which workers know each other in heals."""
    faults: tuple[Fault, ...]
    """Faults to inject."""
    coordinator: Remote[CoordinatorApi]
    """The run's coordinator."""

    @property
    def slots(self) -> int:
        """Workers of the full layout, spares not counted."""
        return self.scaling.slots(self.train.parallel)

    @property
    def witness_every(self) -> int | None:
        """Steps between lanes that several replicas compute. They must come to the same bits."""
        return self.health.witness_every if self._repeats else None

    @property
    def traces_gradients(self) -> bool:
        """Whether each lane's gradient leaves a digest, which is read where replicas are compared
        and a step that is done again comes to the same bits."""
        compared = self.health.compare_every is not None or self.health.witness_every is not None
        return self._repeats and compared and self.scaling.max_replicas > 1

    @property
    def _repeats(self) -> bool:
        return self.train.determinism == "strict"
