"""Further dimensions of a replica's mesh, beside shard and tensor: the place where context parallel
and its like enter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

TAKEN = frozenset(
    {"replica", "replicas", "lanes", "spares", "node", "nodes", "fsdp", "regather", "apart"}
)
"""What a dimension cannot be called: a run's records have these beside its dimensions, and a dry
run and torch's recordings call groups so. Under one of the first, workers would not be counted."""


class MeshDim(Protocol):
    """A dimension whose workers take the same samples and divide the work on them.

    Each worker's loss is the sum over its own part of the targets: the parts' losses, counts and
    gradients are added up, and parameters are sharded over the dimension as over shard. An object
    of it is plain data that the driver and every worker use, so it must be picklable and importable
    on the workers.
    """

    @property
    def name(self) -> str:
        """One word, for messages and records; no other dimension of the mesh has it, and it is none
        of `TAKEN`."""
        ...

    @property
    def degree(self) -> int:
        """Workers along it."""
        ...

    def check(self, train: Any) -> None:
        """The driver asks before anything starts.

        Args:
            train: the run's TrainConfig.

        Raises:
            ConfigError: the run's settings do not go with it.
        """
        ...

    def convert(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Changes the model in place, before it is split: puts in what speaks to the others. Every
        worker calls it each time it builds.

        Args:
            model: the whole model, parameters on the meta device.
            mesh: 1-D, this worker and its peers along the dimension.
        """
        ...

    def part(self, batch: Any, index: int) -> Any:
        """What the worker at `index` takes of a micro-batch, which is on the device. No collective:
        it is on the step path."""
        ...
