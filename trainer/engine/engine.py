"""One worker's part of a replica: its slice of the model, its optimizer, and what they compute.

The optimizer works on plain views of the local slices, and the reduced gradient is one flat buffer
that the parameters' `.grad` are views of, so the step path has no loop over parameters beyond
torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.backend.groups import (
    Device,
    check_replica_group,
    end_replica_collectives,
    torch_device,
)
from trainer.config import TrainConfig
from trainer.data.batches import to_device, upload
from trainer.engine.build import build_model, family_of_task
from trainer.engine.flat_layout import FlatLayout
from trainer.engine.names import PARAMETERS
from trainer.engine.optimizer import SliceOptimizer, as_leaf, make_optimizer
from trainer.engine.state import WorkerState
from trainer.models.init import WeightSource
from trainer.parallel.apply import (
    fill,
    forget_gathered,
    local_slices,
    local_tensor,
    materialize,
    parallelize,
    tensor_dim,
)
from trainer.parallel.backward import BackwardWatch
from trainer.parallel.block_time import BlockTimes
from trainer.parallel.compiled import compiling_backward
from trainer.parallel.host_memory import HostMemory, host_memory
from trainer.parallel.layout import Slot
from trainer.parallel.mesh import ReplicaMesh
from trainer.parallel.offload import Offload
from trainer.parallel.two_level import TwoLevels
from trainer.parallel.wide_sums import AddTo, add_wide, make_add
from trainer.replication.buckets import BUCKET_BYTES
from trainer.replication.lane_sums import LaneSums
from trainer.replication.lanes import lane_buffers, plan_lane_buffers
from trainer.streams import timed_mark
from trainer.tasks.task import PreparedTask

_NORM_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Numbers under one float32 norm; those are added up in float64. All in float64 took eight per cent
of a small model's step on a CPU."""


class Engine:
    """The model and optimizer of one slot. All workers of the replica build it together.

    Where the replica breaks, the model goes, and with it the process group: `let_go_of_model`. What
    is left still takes part in sums over the replicas, and steps. Another engine of the same rank
    is then built round the memory that it has, and goes on from there: `take_over`.

    Args:
        task: what is learned.
        train: the settings of the run.
        slot: this worker's place.
        mesh: the replica's mesh.
        device: "cpu" or "cuda".
        max_replicas: gradient buffers are padded so that so many replicas can own equal pieces.
        heir_of: the engine whose memory it gets, for `take_over`.
    """

    def __init__(
        self,
        task: PreparedTask,
        train: TrainConfig,
        *,
        slot: Slot,
        mesh: ReplicaMesh,
        device: Device,
        max_replicas: int,
        heir_of: Engine | None = None,
    ) -> None:
        self._padding, self._workers = max_replicas, train.parallel.workers
        self.task, self.train_config, self.slot, self.mesh = task, train, slot, mesh
        self.device = torch_device(device)
        self._host: HostMemory | None = self._make_host() if heir_of is None else heir_of._host
        waits_in_stream = self.device.type == "cuda" and slot.dims.workers > 1
        self.block_times = BlockTimes(timed_mark) if waits_in_stream else None
        """Of a worker whose peers' waits are in its stream's time."""
        model, source = self._build_model()
        self._source: WeightSource | None = source
        self.model: nn.Module = parallelize(
            model,
            mesh,
            others=train.parallel.dividing,
            family=family_of_task(task),
            compute_dtype=getattr(torch, train.precision),
            recompute=train.recompute,
            compiled=train.compile,
            offload=self._make_offload(),
            gather_ahead=train.gather_ahead,
            levels=TwoLevels.of(slot.dims),
            reshard=slot.dims.regather != 1,  # by itself a lone worker lets go of what is cast
            times=self.block_times,
        )
        self._slices = local_slices(self.model, slot)
        materialize(self.model, self.device, None if heir_of is None else heir_of.memory())
        self.model.train()
        # Whole on every tensor rank: the first one counts them in the norm, and saves them.
        self._elsewhere = {
            name
            for name, param in self.model.named_parameters()
            if slot.tensor > 0 and tensor_dim(param) is None
        }
        self.layout = FlatLayout(
            self.model,
            room=self._room(),
            counted_elsewhere=self._elsewhere,
            bucket_bytes=train.bucket_bytes or BUCKET_BYTES[device],
        )
        self._watch = BackwardWatch(
            self.model, slot.dims.fsdp, TwoLevels.of(slot.dims), self._make_add()
        )
        self.compiles_next = train.compile != "off"
        """Whether the next micro-batch is the model's first, in which its blocks are compiled."""
        self._lane = torch.empty(0)
        if heir_of is None:
            self._leaves = [as_leaf(local) for local in self.layout.locals]
            self.replace_gradient()
            self.optimizer = self._make_optimizer()
            self.state = self._make_state()

    def _build_model(self) -> tuple[nn.Module, WeightSource]:
        return build_model(self.task, self.train_config, self.device)

    def _make_host(self) -> HostMemory | None:
        """For activations that are offloaded. An heir has its predecessor's."""
        return None if self.train_config.offload is None else host_memory(self.device)

    @property
    def offloaded_bytes(self) -> int:
        """Of the host's memory that are held for activations."""
        return 0 if self._host is None else self._host.held_bytes

    def _make_offload(self) -> Offload | None:
        offload = self.train_config.offload
        if offload is None or self._host is None:
            return None
        return Offload(offload.horizon, offload.least_bytes, self._host)

    @property
    def _named_leaves(self) -> dict[str, nn.Parameter]:
        return dict(zip(self.layout.names, self._leaves, strict=True))

    def _room(self) -> dict[str, int]:
        """Numbers in the longest slice of each parameter over the ranks that it is sharded over."""
        longest = local_slices(self.model, replace(self.slot, rank=self.slot.tensor))
        return {name: math.prod(box.sizes) for name, box in longest.items()}

    def _make_optimizer(self) -> SliceOptimizer:
        train = self.train_config
        return make_optimizer(train.optimizer, self._named_leaves, self.device, train.compile)

    def _make_add(self) -> AddTo:
        train = self.train_config
        narrow = self.slot.dims.fsdp == 1 and train.precision == "bfloat16"
        return make_add(train.compile, self.device) if narrow else add_wide

    def _make_state(self) -> WorkerState:
        frozen = {
            name: local_tensor(param)
            for name, param in self.model.named_parameters()
            if not param.requires_grad
        }
        return WorkerState(
            leaves=self._named_leaves,
            frozen=frozen,
            optimizer=self.optimizer,
            slices=self._slices,
            replicated=self._elsewhere,
        )

    def replace_gradient(self) -> None:
        """Takes a new buffer for the reduced gradient: on Gloo an abandoned collective may still
        write to the old."""
        self.gradient = torch.zeros(self.layout.count + self._padding, device=self.device)
        for leaf, grad in zip(self._leaves, self.layout.views(self.gradient), strict=True):
            leaf.grad = grad

    def make_sums(self, lanes: int, replicas: int, *, traced: bool = True) -> LaneSums:
        """Buffers for this worker's gradients.

        Args:
            lanes: of the run.
            replicas: that there are with all machines; successors beside those that leave do not
                count, as the others' lanes stay what they were.
            traced: see `LaneSums`.
        """
        sums = LaneSums(*self._sums_of(lanes, replicas), traced=traced)
        all_lanes = lane_buffers(tuple(range(lanes)), lanes)
        if replicas > 1 and sums.most is not None and sums.most < all_lanes:
            sums.reserve_on_host()
        return sums

    def _sums_of(
        self, lanes: int, replicas: int
    ) -> tuple[int, int, torch.device, torch.dtype, int | None]:
        train = self.train_config
        dtype = getattr(torch, train.reduce_dtype)
        most = plan_lane_buffers(train.lane_buffers, lanes, replicas, self.device.type)
        return lanes, self.gradient.numel(), self.device, dtype, most

    def initialize(self) -> None:
        """Fills the weights from the seed or the pretrained files; the optimizer starts empty.

        The engine may hold something already: a newcomer whose source died in the middle of a heal
        starts from the seed where nobody else has the state.
        """
        source = self._source or build_model(self.task, self.train_config)[1]
        self.state.await_copy()
        fill(self.model, self._slices, source)
        forget_gathered(self.model)
        for name, tensor in self.state.tensors().items():
            if not name.startswith(PARAMETERS):
                tensor.zero_()
        self.state.optimizer_steps = 0
        self.forget_initial_weights()

    def clear_weights(self) -> None:
        """Sets the weights to 0, from whatever the memory held."""
        torch._foreach_zero_(list(self.memory().values()))

    def forget_initial_weights(self) -> None:
        """Lets go of what the weights come from: a custom model is held whole until then."""
        self._source = None

    def load(self, values: Mapping[str, torch.Tensor], *, optimizer_steps: int) -> None:
        """Fills the state with tensors by name; see `WorkerState.fill`."""
        self.state.fill(values, optimizer_steps=optimizer_steps)
        forget_gathered(self.model)
        self.forget_initial_weights()

    # -- from one replica to the next --------------------------------------------------------------

    def let_go_of_model(self) -> None:
        """Drops what keeps the replica's process group alive: the model, and what refers to it. The
        gradient stays, in memory that no abandoned collective writes to: NCCL's end with the abort,
        and there is no memory for a second one."""
        if self.device.type == "cuda":
            end_replica_collectives()
            torch.cuda.synchronize()
        else:
            gradient = self.gradient
            self.replace_gradient()
            self.gradient.copy_(gradient)
        self.layout.params.clear()
        self._lane = torch.empty(0)
        del self.model, self.mesh, self._watch

    def memory(self) -> dict[str, torch.Tensor]:
        """The local slices of all parameters, by name."""
        return {
            **self.state.frozen,
            **dict(zip(self.layout.names, self.layout.locals, strict=True)),
        }

    def take_over(self, former: Engine) -> None:
        """Goes on with the state and the reduced gradient of the engine that this one is the heir
        of, and which may have done steps since this one was built.

        The memory is one, but for slices that are shorter than those of other ranks: FSDP2 pads
        them, in memory of its own.
        """
        former.state.await_copy()
        self._leaves, self.optimizer, self.gradient = (
            former._leaves,
            former.optimizer,
            former.gradient,
        )
        with torch.no_grad():
            for local, leaf in zip(self.layout.locals, self._leaves, strict=True):
                if local.data_ptr() != leaf.data_ptr():
                    local.copy_(leaf)
                    leaf.data = local
        self.state = self._make_state()
        self.forget_initial_weights()

    @property
    def rank(self) -> int:
        """Rank in the replica."""
        return self.slot.rank

    # -- the step ---------------------------------------------------------------------------------

    def take(self, batch: Any) -> Any:
        """This worker's part of a micro-batch, on the device.

        Args:
            batch: all of it, the same on the workers that share its samples.
        """
        batch = to_device(batch, self.device)
        for dim in self.train_config.parallel.dividing:
            batch = dim.part(batch, self.slot.coordinates[dim.name])
        return batch

    def collect_in(self, flat: torch.Tensor) -> None:
        """Says where the gradients of the coming lane go; the model has none yet.

        Args:
            flat: float32, `layout.count` numbers or more.
        """
        self._lane = flat
        self._watch.offer(self.layout.group_memories(flat))

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a micro-batch that is not the lane's last."""
        self.compiles_next = False
        with self._watch.backward(), compiling_backward():
            loss.backward()

    def backward_at_last(self, loss: torch.Tensor, taken: Callable[[int], None]) -> None:
        """Backward of a lane's last micro-batch. Leaves the lane's gradients where `collect_in`
        said, and the model without any.

        Args:
            loss: of the micro-batch.
            taken: called with n whenever the first n numbers are there: during backward, with the
                end of each parameter group, and with all of them at last.
        """
        self.compiles_next, there = False, 0

        def take(groups: int) -> None:
            nonlocal there
            for group in range(there, groups):
                self._take_group(group)
            there = groups
            taken(self.layout.group_ends[groups])

        with self._watch.backward(take), compiling_backward():
            loss.backward()
        take(len(self.layout.group_ends) - 1)
        # Not before: until backward ends, FSDP may reuse the memory of a gradient that is let go.
        self.model.zero_grad(set_to_none=True)

    def _take_group(self, group: int) -> None:
        """Copies a group's gradients, unless they are in their places already. A parameter without
        one has had no part in the loss.

        Raises:
            AssertionError: they are there in another order, which a copy within one memory would
                spoil.
        """
        layout, params = self.layout, slice(*self.layout.group_params[group : group + 2])
        grads = [
            None if param.grad is None else local_tensor(param.grad)
            for param in layout.params[params]
        ]
        begin, size = self._lane.data_ptr(), self._lane.element_size()
        if all(
            grad is not None and (grad.numel() == 0 or grad.data_ptr() == begin + size * start)
            for grad, start in zip(grads, layout.starts[params], strict=True)
        ):
            return
        views = layout.group_views(self._lane, group)
        pairs = [(v, g) for v, g in zip(views, grads, strict=True) if g is not None]
        part = self._lane[slice(*layout.group_ends[group : group + 2])]
        start, end = part.data_ptr(), part.data_ptr() + part.nbytes
        if any(start <= grad.data_ptr() < end for _, grad in pairs):
            raise AssertionError(
                f"FSDP2 of torch {torch.__version__} lays out a group's gradients in another order "
                "than trainer/parallel/backward.py"
            )
        part.zero_()
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])

    def norm_squared(self, gradient: torch.Tensor) -> torch.Tensor:
        """This worker's part of the squared norm of the reduced flat gradient: a float64 on the
        device."""
        size = _NORM_CHUNK[self.device.type]
        chunks = [c for start, end in self.layout.own for c in gradient[start:end].split(size)]
        norms = torch.stack(torch._foreach_norm(chunks)) if chunks else gradient.new_zeros(1)
        return norms.double().square().sum()

    def sum_at_first(self, vector: list[float]) -> list[float]:
        """Sums a float64 vector at the replica's first worker; the others get something of no
        use."""
        return self._agree(vector, lambda tensor: dist.reduce(tensor, 0))

    def hand_out(self, vector: list[float]) -> list[float]:
        """The first worker's `vector`, on every worker of the replica."""
        return self._agree(vector, lambda tensor: dist.broadcast(tensor, 0))

    def sum_in_replica(self, vector: list[float]) -> list[float]:
        """All-reduces a float64 vector over the replica."""
        return self._agree(vector, dist.all_reduce)

    def _agree(
        self, vector: list[float], collective: Callable[[torch.Tensor], object]
    ) -> list[float]:
        """What a collective of the replica makes of a small vector. Waits for it, and so for the
        device; one worker alone has nothing to wait for."""
        if self._workers == 1:
            return vector
        tensor = upload(vector, self.device)
        collective(tensor)
        numbers: list[float] = tensor.tolist()
        check_replica_group()
        return numbers

    def apply(self, step: int, *, scale: float) -> None:
        """The optimizer step on `gradient` times `scale`, at the learning rate of `step`. What it
        leaves in `gradient` is of no use."""
        self.state.await_copy()
        rate = self.train_config.optimizer.rate(step, self.train_config.steps)
        if not self.optimizer.takes_scale:
            self.gradient.mul_(scale)
            scale = 1.0
        self.optimizer.step(rate, scale)
