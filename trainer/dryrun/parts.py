"""The parts of a worker that a dry run has others of: what would need peers, data or real numbers.

Everything else is what trains: model, FSDP2, tensor parallelism, lanes, reduction, commit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from trainer.backend.groups import Device
from trainer.backend.rendezvous import Rendezvous
from trainer.dryrun.watch import Watch
from trainer.engine.build import build_model
from trainer.engine.engine import Engine
from trainer.engine.optimizer import SliceOptimizer
from trainer.loop.steps import TrainLoop
from trainer.models.init import WeightSource
from trainer.parallel.host_memory import HostMemory
from trainer.parallel.wide_sums import AddTo, add_wide
from trainer.replication.lane_sums import LaneSums
from trainer.replication.reduction import Reduction
from trainer.replication.replicas import CrossGroup, Flight

REPLICAS = "replicas"
"""What the group across replicas is called."""


class DryEngine(Engine):
    """Says what its memory is for, and reads no address.

    Args:
        watch: told of it.
        counter: see `SliceOptimizer`.
        arguments: the engine's.
    """

    def __init__(
        self, *arguments: Any, watch: Watch, counter: torch.Tensor | None, **more: Any
    ) -> None:
        self._watcher, self._counter = watch, counter
        with watch.labelled("parameters"):
            super().__init__(*arguments, **more)

    def _build_model(self) -> tuple[nn.Module, WeightSource]:
        """See Engine. Without a device: this process's is no worker's, which converters ask of."""
        return build_model(self.task, self.train_config)

    def _make_host(self) -> HostMemory | None:
        return None if self.train_config.offload is None else DryMemory()

    def replace_gradient(self) -> None:
        """See Engine."""
        with self._watcher.labelled("gradients"):
            super().replace_gradient()

    def make_sums(self, lanes: int, replicas: int, *, traced: bool = True) -> LaneSums:
        """See Engine."""
        return DrySums(*self._sums_of(lanes, replicas), traced=traced, watch=self._watcher)

    def _make_optimizer(self) -> SliceOptimizer:
        with self._watcher.labelled("optimizer"):
            return SliceOptimizer(self.train_config.optimizer, self._named_leaves, self._counter)

    def _make_add(self) -> AddTo:
        return add_wide  # nothing is compiled here, and a sum takes no memory either way

    def take(self, batch: Any) -> Any:
        """See Engine. A sample's numbers are of no use."""
        return super().take(tree_map_only(torch.Tensor, torch.empty_like, batch))

    def collect_in(self, flat: torch.Tensor) -> None:
        """See Engine. Views will do where there are no numbers to be put elsewhere."""
        self._watch.offer([flat[start:end] for start, end in pairwise(self.layout.group_ends)])

    def _take_group(self, group: int) -> None:
        """See Engine. Whether they are in their places is a matter of addresses; a copy would take
        no memory."""

    def norm_squared(self, gradient: torch.Tensor) -> torch.Tensor:
        """See Engine. One number for the whole: thousands of norms take seconds here."""
        return gradient.new_zeros((), dtype=torch.float64)


class DryMemory(HostMemory):
    """Counts what is taken of the host, and takes none of it. What comes back is of the device."""

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(1, dtype=torch.uint8).expand(size)

    def _copy(self, block: torch.Tensor, values: torch.Tensor, *, back: bool) -> _DryFlight:
        return _DryFlight(values)


class _DryFlight:
    """Keeps what is copied until it is waited for, as on a GPU."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values: torch.Tensor | None = values

    def wait(self) -> None:
        self._values = None

    drop = wait


class DrySums(LaneSums):
    """Lane gradients that are counted as such."""

    def __init__(self, *arguments: Any, watch: Watch, **more: Any) -> None:
        self._watcher = watch
        super().__init__(*arguments, **more)

    def _new(self) -> torch.Tensor:
        with self._watcher.labelled("gradients"):
            return super()._new()

    def _new_on_host(self) -> torch.Tensor:
        """See LaneSums. What is not on the device does not count."""
        return torch.empty(1, dtype=torch.float32).expand(self._length)


class DryReduction(Reduction):
    """A reduction whose memory is counted as buckets."""

    def __init__(self, *arguments: Any, watch: Watch, **more: Any) -> None:
        self._watcher = watch
        super().__init__(*arguments, **more)

    def start(self, stop: int) -> None:
        """See Reduction."""
        with self._watcher.labelled("buckets"):
            super().start(stop)

    def finish(self) -> None:
        """See Reduction."""
        with self._watcher.labelled("buckets"):
            super().finish()


class _Done:
    """The work of a collective that took no time."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Alone:
    """A process group without peers: counts what it is asked for."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def allreduce(self, tensors: list[torch.Tensor]) -> _Done:
        return self._count("all_reduce", *tensors)

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Done:
        return self._count("broadcast", tensor)

    def alltoall_base(
        self, into: torch.Tensor, outgoing: torch.Tensor, receives: list[int], sends: list[int]
    ) -> _Done:
        return self._count("all_to_all", into, outgoing)

    def _allgather_base(self, into: torch.Tensor, own: torch.Tensor) -> _Done:
        return self._count("all_gather", into)

    def _count(self, kind: str, *tensors: torch.Tensor) -> _Done:
        self._watch.count(REPLICAS, kind, max(tensor.nbytes for tensor in tensors))
        return _Done()


class DryCross(CrossGroup):
    """The group across replicas, of which there is only this one.

    Args:
        watch: counts its collectives.
        gathers: as on CUDA, each bucket's pieces in one collective.
        more: CrossGroup's arguments.
    """

    def __init__(self, *, watch: Watch, gathers: bool, **more: Any) -> None:
        self._watcher, self._gathers = watch, gathers
        meet = Rendezvous(host="", port=0, timeout_s=1.0)
        super().__init__(meet, "", device="cpu", leave_now=lambda: False, **more)

    def _join(self, rendezvous: Rendezvous, prefix: str, device: Device) -> None:
        self._groups = [_Alone(self._watcher)]

    def start_gathering(self, whole: torch.Tensor) -> list[Flight]:
        """See CrossGroup."""
        if not self._gathers:
            return super().start_gathering(whole)
        return [self.start(lambda group: group._allgather_base(whole, whole), whole)]


class DryLoop(TrainLoop):
    """The loop, with a reduction that says what its memory is for."""

    def __init__(self, *arguments: Any, watch: Watch, **more: Any) -> None:
        self._watcher = watch
        super().__init__(*arguments, **more)

    def make_reduction(self, kind: Callable[..., Reduction] = DryReduction) -> Reduction:
        """See TrainLoop."""
        return super().make_reduction(partial(kind, watch=self._watcher))
