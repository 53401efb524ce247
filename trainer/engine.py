"""One worker's part of a replica: its slice of the model, its optimizer, and what leaves and enters
them.

The optimizer works on plain views of the local slices, and the reduced gradient is one flat buffer
that the parameters' `.grad` are views of, so the step path has no loop over parameters beyond
torch's own.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from checkpointing import Box, Reader, TensorSlice
from trainer.backend.groups import Device, torch_device
from trainer.buckets import BUCKET_BYTES, plan_buckets
from trainer.config import TrainConfig
from trainer.models.init import WeightSource
from trainer.parallel.apply import (
    fill,
    local_slices,
    local_tensor,
    materialize,
    parallelize,
    tensor_dim,
)
from trainer.parallel.backward import BackwardWatch, groups_in_backward_order
from trainer.parallel.layout import Slot
from trainer.schedule import learning_rate
from trainer.task import PreparedTask

_NORM_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Numbers under one float32 norm; those are added up in float64. All in float64 took eight per cent
of a small model's step on a CPU."""

PARAMETERS, MOMENTS = "param/", ("exp_avg/", "exp_avg_sq/")


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """What a worker keeps of a broken replica."""

    rank: int
    """Its rank there."""
    tensors: dict[str, torch.Tensor]
    """`Engine.state_tensors`."""
    gradient: torch.Tensor
    """The reduced gradient of the step in progress; whole where the step was committed."""
    optimizer_steps: int
    """Steps that reached the weights."""


class Engine:
    """The model and optimizer of one slot. All workers of the replica build it together.

    Args:
        task: what is learned.
        train: the settings of the run.
        slot: this worker's place.
        mesh: the replica's mesh, shard x tensor.
        device: "cpu" or "cuda".
        max_replicas: gradient buffers are padded so that so many replicas can own equal pieces.
        bucket_bytes: the least and the most that are reduced at once.
    """

    def __init__(
        self,
        task: PreparedTask,
        train: TrainConfig,
        *,
        slot: Slot,
        mesh: DeviceMesh,
        device: Device,
        max_replicas: int,
        bucket_bytes: tuple[int, int] = BUCKET_BYTES,
    ) -> None:
        self._padding, self._workers = max_replicas, train.parallel.workers
        self.task, self.train_config, self.slot, self.mesh = task, train, slot, mesh
        self.device = torch_device(device)
        model, source = task.build(train.seed)
        self._source: WeightSource | None = source
        self.model: nn.Module = parallelize(
            model,
            mesh,
            plan=getattr(model, "tp_plan", None) or {},
            compute_dtype=getattr(torch, train.precision),
        )
        self.slices = local_slices(
            self.model, slot, shard=train.parallel.shard, tensor=train.parallel.tensor
        )
        materialize(self.model, self.device)
        self.model.train()
        self._flatten(bucket_bytes)
        self._watch = BackwardWatch(self.model)
        self.optimizer = self._make_optimizer()

    def _flatten(self, bucket_bytes: tuple[int, int]) -> None:
        """Lays the trainable local slices out in one flat gradient, in the order in which backward
        finishes them; those that a tensor rank before this one already counts come last, so that
        the norm is over a prefix."""
        groups = groups_in_backward_order(self.model)
        order = {id(param): index for index, group in enumerate(groups) for param in group}

        def place(param: nn.Parameter) -> int:
            return len(groups) if self._counted_elsewhere(param) else order[id(param)]

        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        named.sort(key=lambda entry: place(entry[1]))
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._locals = [local_tensor(param) for param in self._params]
        self._counts = [local.numel() for local in self._locals]
        # In the middle of a step FSDP2 shows whole parameters in the model's place of the slices.
        self._frozen = {
            PARAMETERS + name: local_tensor(param)
            for name, param in self.model.named_parameters()
            if not param.requires_grad
        }
        self._replicated = {
            name for name, param in self.model.named_parameters() if self._counted_elsewhere(param)
        }
        places, ends = [place(param) for param in self._params], [0, *accumulate(self._counts)]
        self._group_params = [bisect(places, group) for group in range(len(groups) + 1)]
        self._group_ends = [ends[params] for params in self._group_params]
        self._own, self.count = self._group_ends[-2:]
        least, most = (size // torch.float32.itemsize for size in bucket_bytes)
        self.buckets = plan_buckets(self._group_ends, least=least, most=most)

    def _counted_elsewhere(self, param: nn.Parameter) -> bool:
        return self.slot.tensor > 0 and tensor_dim(param) is None

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat buffer of `count` numbers (or more), shaped like the local slices."""
        parts = flat[: self.count].split(self._counts)
        return [part.view(local.shape) for part, local in zip(parts, self._locals, strict=True)]

    def _make_optimizer(self) -> torch.optim.AdamW:
        settings = self.train_config.optimizer
        self._leaves = [nn.Parameter(local) for local in self._locals]
        self.replace_gradient()
        decayed = [leaf for leaf in self._leaves if leaf.dim() >= 2]
        plain = [leaf for leaf in self._leaves if leaf.dim() < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        for leaf in self._leaves:
            optimizer.state[leaf] = {
                "step": torch.zeros((), dtype=torch.float32, device=self.device),
                "exp_avg": torch.zeros_like(leaf),
                "exp_avg_sq": torch.zeros_like(leaf),
            }
        return optimizer

    def replace_gradient(self) -> None:
        """Takes a new buffer for the reduced gradient: an abandoned collective may still write to
        the old."""
        self.gradient = torch.zeros(self.count + self._padding, device=self.device)
        for leaf, grad in zip(self._leaves, self.views(self.gradient), strict=True):
            leaf.grad = grad

    def initialize(self) -> None:
        """Fills the weights from the seed or the pretrained files; the optimizer starts empty.

        The engine may hold something already: a newcomer whose source died in the middle of a heal
        starts from the seed where nobody else has the state.
        """
        source = self._source or self.task.build(self.train_config.seed)[1]
        fill(self.model, self.slices, source)
        for name, tensor in self.state_tensors().items():
            if name.startswith(MOMENTS):
                tensor.zero_()
        self.optimizer_steps = 0
        self.forget_initial_weights()

    def forget_initial_weights(self) -> None:
        """Lets go of what the weights come from: a custom model is held whole until then."""
        self._source = None

    @property
    def rank(self) -> int:
        """Rank in the replica."""
        return self.slot.shard * self.train_config.parallel.tensor + self.slot.tensor

    # -- the step ---------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a micro-batch to the local ones."""
        with self._watch.backward():
            loss.backward()

    def backward_into(
        self, flat: torch.Tensor, loss: torch.Tensor, taken: Callable[[int], None]
    ) -> None:
        """Backward of a lane's last micro-batch: moves the lane's gradients into a flat buffer, and
        leaves the model without any.

        Args:
            flat: the buffer, of `count` numbers or more.
            loss: of the micro-batch.
            taken: called with n whenever the first n numbers are there: during backward, with the
                end of each parameter group, and with `count` at last.
        """
        views, first = self.views(flat), 0

        def take(groups: int) -> None:
            nonlocal first
            last = self._group_params[groups - 1]
            _copy_gradients(self._params[first:last], views[first:last])
            first = last
            taken(self._group_ends[groups - 1])

        with self._watch.backward(take):
            loss.backward()
        take(len(self._group_ends))
        # Not before: until backward ends, FSDP may reuse the memory of a gradient that is let go.
        self.model.zero_grad(set_to_none=True)

    def norm_squared(self, gradient: torch.Tensor) -> float:
        """This worker's part of the squared norm of the reduced flat gradient."""
        chunks = gradient[: self._own].split(_NORM_CHUNK[self.device.type])
        norms = torch.stack(torch._foreach_norm(chunks)) if self._own else gradient.new_zeros(1)
        return float(norms.double().square().sum())

    def sum_at_first(self, vector: list[float]) -> list[float]:
        """Sums a float64 vector at the replica's first worker; the others get something of no
        use."""
        if self._workers == 1:
            return vector
        tensor = torch.tensor(vector, dtype=torch.float64, device=self.device)
        dist.reduce(tensor, 0)
        return tensor.tolist()

    def hand_out(self, vector: list[float]) -> list[float]:
        """The first worker's `vector`, on every worker of the replica."""
        if self._workers == 1:
            return vector
        tensor = torch.tensor(vector, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return tensor.tolist()

    def sum_in_replica(self, vector: list[float]) -> list[float]:
        """All-reduces a small float64 vector over the replica. Waits for the device."""
        tensor = torch.tensor(vector, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def apply(self, step: int, *, scale: float) -> None:
        """The optimizer step on `gradient` times `scale`, at the learning rate of `step`."""
        self.gradient.mul_(scale)
        rate = learning_rate(self.train_config.optimizer, step, self.train_config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    # -- state ------------------------------------------------------------------------------------

    @property
    def optimizer_steps(self) -> int:
        """Steps that reached the weights; fewer than the committed ones where some were skipped."""
        return int(self.optimizer.state[self._leaves[0]]["step"])

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        for leaf in self._leaves:
            self.optimizer.state[leaf]["step"].fill_(steps)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state by its name in a checkpoint: local slices, sharing their
        memory."""
        state = {PARAMETERS + n: local for n, local in zip(self._names, self._locals, strict=True)}
        for prefix in MOMENTS:
            key = prefix.rstrip("/")
            for name, leaf in zip(self._names, self._leaves, strict=True):
                state[prefix + name] = self.optimizer.state[leaf][key]
        return {**self._frozen, **state}

    def state_slices(self) -> dict[str, TensorSlice]:
        """The box of the full tensor that each entry of `state_tensors` is."""
        return {
            name: replace(self.slices[name.split("/", 1)[1]], name=name)
            for name in self.state_tensors()
        }

    def slices_to_save(self) -> list[tuple[TensorSlice, torch.Tensor]]:
        """Copies on the host of what this worker writes: each unique slice once in the replica."""
        tensors, slices = self.state_tensors(), self.state_slices()
        return [
            (slices[name], tensor.detach().to("cpu", copy=True).reshape(slices[name].sizes))
            for name, tensor in tensors.items()
            if name.split("/", 1)[1] not in self._replicated
        ]

    def hold_state(self) -> HeldState:
        """The state without the model, which would keep the replica's process group alive."""
        return HeldState(
            rank=self.rank,
            tensors=self.state_tensors(),
            gradient=self.gradient,
            optimizer_steps=self.optimizer_steps,
        )

    @torch.no_grad()
    def adopt(self, held: HeldState) -> None:
        """Takes over the state and the reduced gradient that an engine of the same rank had."""
        mine = self.state_tensors()
        torch._foreach_copy_(list(mine.values()), [held.tensors[name] for name in mine])
        self.gradient.copy_(held.gradient)
        self.optimizer_steps = held.optimizer_steps
        self.forget_initial_weights()

    def read(self, reader: Reader) -> dict[str, torch.Tensor]:
        """This worker's boxes of a checkpoint, by name; the state stays as it is."""
        slices = self.state_slices()
        names = [name for name, tensor in self.state_tensors().items() if tensor.numel()]
        boxes = [Box(name, slices[name].offsets, slices[name].sizes) for name in names]
        return dict(zip(names, reader.read_many(boxes), strict=True))

    def load(self, values: dict[str, torch.Tensor], *, optimizer_steps: int) -> None:
        """Fills the state with what `read` returned."""
        tensors = self.state_tensors()
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value.reshape(tensors[name].shape))
        self.optimizer_steps = optimizer_steps
        self.forget_initial_weights()

    def checksum(self) -> int:
        """A cheap number over this worker's state: one bit changed changes it. Waits for the
        device."""
        words = [_words(tensor) for tensor in self.state_tensors().values() if tensor.numel()]
        sums = torch.stack([word.sum(dtype=torch.int64) for word in words])
        places = torch.arange(1, len(words) + 1, device=sums.device)
        return int((sums * places).sum())

    def digest(self) -> str:
        """SHA-256 of this worker's state, to compare replicas."""
        return _digest(tensor for _, tensor in sorted(self.state_tensors().items()))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers."""
    return tensor.view(-1).view(torch.int32 if tensor.nbytes % 4 == 0 else torch.uint8)


def _copy_gradients(params: list[nn.Parameter], into: list[torch.Tensor]) -> None:
    """Copies local gradients; a parameter without one has had no part in the loss."""
    views, grads = [], []
    for view, param in zip(into, params, strict=True):
        if param.grad is None:
            view.zero_()
        else:
            views.append(view)
            grads.append(local_tensor(param.grad))
    if grads:
        torch._foreach_copy_(views, grads)


def _digest(tensors: Iterable[Any]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
