"""What to learn: the settings of the data plane.

Imports without torch, so that a driver can check a configuration on a machine that has none.
`TrainConfig.check` finds what can be known without building the model; the task adds its own
checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from checkpointing.field_types import type_name
from trainer.errors import ConfigError, check_types
from trainer.optimizer import (
    Optimizer,
    Schedule,
    WarmupCosine,
    check_optimizer,
    check_ranges,
    check_schedule,
    check_settings,
)
from trainer.parallel.context.dim import ContextParallel
from trainer.parallel.dims import TAKEN
from trainer.parallel.layout import ParallelDims
from trainer.parallel.strategy import Layout, Strategy, plan_regathered

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.models.converter import ModelConverter
    from trainer.parallel.dims import MeshDim

_LEAST_BUCKET_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with gradient clipping, linear warm-up and cosine decay."""

    lr: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr_ratio: float = 0.1
    """Learning rate at the last step, as a share of `lr`."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0; fewer than those of the run."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    eps: float = 1e-8
    """AdamW's denominator offset."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to parameters of two or more dimensions."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 turns clipping
    off."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the moments. `bfloat16`: four bytes a parameter less; an update is computed
    in float32 and rounded up or down at random, the same way on all replicas."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the parameters that the optimizer updates and that checkpoints hold.
    `bfloat16`: two bytes a parameter less; they are rounded as such moments are. Gradients stay
    float32."""
    schedule: Schedule | None = None
    """The learning rate by step, in place of `lr`, `min_lr_ratio` and `warmup_steps`; None: warm-up
    and cosine by these three."""

    def __post_init__(self) -> None:
        check_types(self, "train.optimizer")
        if self.schedule is not None:
            check_schedule(self.schedule)

    @property
    def moments(self) -> tuple[str, ...]:
        """See Optimizer."""
        return ("exp_avg", "exp_avg_sq")

    @property
    def info(self) -> dict[str, Any]:
        """See Optimizer. Defaults of what came later are left out, so that it equals what versions
        without these settings have written: exports compare it."""
        info = asdict(self)
        for name in ("moment_dtype", "master_dtype"):
            if info[name] == "float32":
                del info[name]
        fields = info.pop("schedule")
        if self.schedule is None:
            return info
        return {**info, "schedule": {"class": type_name(self.schedule), **fields}}

    def check(self) -> None:
        """Raises ConfigError where a value is out of its range."""
        check_ranges(
            "train.optimizer",
            [
                *WarmupCosine.ranges(self),
                ("betas[0]", self.betas[0], 0 <= self.betas[0] < 1, "0 or more, below 1"),
                ("betas[1]", self.betas[1], 0 <= self.betas[1] < 1, "0 or more, below 1"),
                ("eps", self.eps, self.eps > 0, "a small positive number"),
                ("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more"),
                ("clip_norm", self.clip_norm, self.clip_norm >= 0, "0 (off) or a positive norm"),
            ],
        )

    def rate(self, step: int, steps: int) -> float:
        """See Schedule."""
        return self._schedule.rate(step, steps)

    def make(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """See Optimizer."""
        import torch

        decayed = [param for param in params.values() if param.dim() >= 2]
        plain = [param for param in params.values() if param.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        if "bfloat16" in (self.moment_dtype, self.master_dtype):
            from trainer.rounded_adamw import RoundedAdamW

            dtype = getattr(torch, self.moment_dtype)
            return RoundedAdamW(
                groups, lr=self.lr, betas=self.betas, eps=self.eps, moment_dtype=dtype
            )
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)

    @cached_property
    def _schedule(self) -> Schedule:
        if self.schedule is not None:
            return self.schedule
        return WarmupCosine(
            lr=self.lr, min_lr_ratio=self.min_lr_ratio, warmup_steps=self.warmup_steps
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one replica is split over its workers: `shard` x `context` x `tensor` of them hold one
    copy, times the degrees of `others`."""

    shard: int = 1
    """Sharded data parallel degree (FSDP2)."""
    context: int = 1
    """Context parallel degree: so many workers share the tokens of each sample, and parameters are
    sharded over them as well."""
    tensor: int = 1
    """Tensor parallel degree, with sequence parallelism between the blocks. The workers of a group
    should be on one node."""
    strategy: Strategy | None = None
    """What the layout is meant to be: `NO_SHARD`, `SHARD_GRAD_OP`, `FULL_SHARD` (one replica) or
    `HYBRID_SHARD` (several); one whose degrees come to something else is refused. None: whatever
    they come to."""
    reshard_after_forward: bool | int | None = None
    """Whether a block's parameters are let go of after its forward and gathered again for its
    backward; a number: they lie over so many workers in between, a divisor of those that they are
    sharded over. None: yes, except with `SHARD_GRAD_OP`. On a single worker they are what is cast
    from float32 for the computation."""
    others: tuple[MeshDim, ...] = ()
    """Further dimensions, whose workers divide the work on the same samples; see
    `trainer.parallel.dims`."""
    workers_per_node: int | None = None
    """Workers of one replica on each of its nodes. Parameters are then gathered, and gradients
    scattered, in two levels: across nodes and inside them. Gradients are summed in another order
    than without, and in the same one wherever workers happen to be. None: in one level."""

    def __post_init__(self) -> None:
        check_types(self, "train.parallel")
        if self.workers_per_node is not None and self.workers_per_node < 1:
            raise ConfigError(
                "train.parallel.workers_per_node",
                self.workers_per_node,
                "a node of a replica has workers",
                "Use 1 or more, or None",
            )

    @property
    def dividing(self) -> tuple[MeshDim, ...]:
        """The dimensions whose workers divide the work on the same samples, tensor apart."""
        if self.context == 1:
            return self.others
        return (*self.others, ContextParallel(degree=self.context))

    @property
    def dims(self) -> ParallelDims:
        """The mesh of one replica, as plain numbers."""
        flat = self._flat
        if self.workers_per_node is None:
            return flat
        return replace(flat, nodes=flat.workers // self.workers_per_node)

    @property
    def _flat(self) -> ParallelDims:
        others = tuple((dim.name, dim.degree) for dim in self.dividing)
        dims = ParallelDims(shard=self.shard, others=others, tensor=self.tensor)
        between = plan_regathered(self.reshard_after_forward, self.strategy, dims.fsdp, self.tensor)
        resharded = between == dims.fsdp and self.reshard_after_forward is not False
        return replace(dims, regather=None if resharded else between)

    def layout(self, replicas: int) -> Layout:
        """That of a whole run.

        Raises:
            ConfigError: it is not the strategy that is wanted, or cannot be.
        """
        layout = Layout(dims=self.dims, replicas=replicas)
        layout.check(self.strategy)
        return layout

    @property
    def workers(self) -> int:
        """Workers in one replica."""
        return self._flat.workers

    @property
    def node_sizes(self) -> list[int]:
        """What `workers_per_node` can be, beside None: it leaves several nodes, and on each several
        workers that parameters are sharded over."""
        all_, unit = self.workers, self.workers // self.shard
        return [n for n in range(unit, all_, unit) if not all_ % n and n > self.tensor]

    def check(self, train: TrainConfig) -> None:
        """Raises ConfigError where a degree is below 1, a name is taken, or a dimension does not go
        with the rest of `train`."""
        names = ["shard", *(dim.name for dim in self.others), "context", "tensor"]
        degrees = [self.shard, *(dim.degree for dim in self.others), self.context, self.tensor]
        for name, degree in zip(names, degrees, strict=True):
            field = f"train.parallel.{name}"
            if degree < 1:
                raise ConfigError(field, degree, "must be at least 1", "Use 1 or more")
            if names.count(name) > 1:
                raise ConfigError(field, name, "two dimensions have this name", "Use another")
            if name in TAKEN:
                raise ConfigError(
                    "train.parallel.others",
                    name,
                    "records and dry runs call something else so",
                    f"Use another name than {', '.join(sorted(TAKEN))}",
                )
        self._check_nodes()
        for dim in self.dividing:
            dim.check(train)

    def _check_nodes(self) -> None:
        here, possible = self.workers_per_node, self.node_sizes
        if here is not None and here not in possible:
            raise ConfigError(
                "train.parallel.workers_per_node",
                here,
                f"it does not cut the {self.workers} workers of a replica, in groups of "
                f"{self.workers // self.shard} that share samples, over two nodes or more with two "
                "or more each that parameters are sharded over",
                f"Use {' or '.join(map(str, possible))}" if possible else "Use None",
            )
        if here is not None and self._flat.regathers_partly:
            raise ConfigError(
                "train.parallel.reshard_after_forward",
                self.reshard_after_forward,
                "parameters that lie over fewer workers are gathered by FSDP2 itself, not in two "
                "levels",
                "Use True or False, or workers_per_node = None",
            )


@dataclass(frozen=True)
class Steps:
    """Steps `first` to `last` of a run, both included; the run begins with step 0."""

    first: int
    """1 or more: step 0 warms up."""
    last: int
    """`first` or more."""

    def __post_init__(self) -> None:
        check_types(self, "train.profile")
        if self.first < 1:
            raise ConfigError("train.profile.first", self.first, "step 0 warms up", "Use 1 or more")
        if self.last < self.first:
            raise ConfigError(
                "train.profile.last",
                self.last,
                f"it comes before the first step, {self.first}",
                f"Use {self.first} or more",
            )


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Which activations wait in the host's memory for backward, and when they come back."""

    horizon: int = 2
    """How many blocks ahead backward fetches a block's activations. The device holds those of so
    many blocks, and of the one at work; the last ones of the model never leave it. Use more where a
    block's copy takes longer than its computation."""
    least_bytes: int = 2**20
    """Smaller tensors stay on the device."""

    def __post_init__(self) -> None:
        check_types(self, "train.offload")
        for name, value in (("horizon", self.horizon), ("least_bytes", self.least_bytes)):
            if value < 1:
                raise ConfigError(
                    f"train.offload.{name}", value, "must be at least 1", "Use 1 or more"
                )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to learn, for how long, and how one replica is laid out."""

    task: Any
    """A `trainer.tasks.task.Task`: the model, its loss and its data (`CausalLM` or
    `CustomTask`)."""
    steps: int
    """Optimizer steps of the whole run."""
    global_batch: int
    """Samples in a step, whatever the number of replicas."""
    micro_batch: int | None = None
    """Samples a worker takes through the model at once; None: all it has of a lane."""
    lanes: int | None = None
    """Micro-batch sequences that make up the global batch; None: `scaling.max_replicas`. A run
    keeps them, and replicas beyond them compute nothing: set the most that it may ever have."""
    prefetch: int = 2
    """Micro-batches that a thread of each worker reads ahead; 0: each is read when it is due."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How one replica is split over workers."""
    optimizer: Optimizer = field(default_factory=OptimizerConfig)
    """AdamW (`OptimizerConfig`) or another one, with clipping and the learning-rate schedule; see
    `trainer.optimizer`."""
    converters: tuple[ModelConverter, ...] = ()
    """What changes the model before it is split over workers, in order; see
    `trainer.models.converter`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of the computation. Parameters stay float32, and so do sums inside a replica;
    for those over replicas see `reduce_dtype`, for parameters and moments `master_dtype` and
    `moment_dtype` of `OptimizerConfig`."""
    recompute: Literal["full", "selective"] | int | float | None = None
    """Activations that backward computes again instead of keeping them: `full`, all inside each
    block; a whole number n, all inside each n-th block; `selective`, all but attention, sums over
    tensor ranks and every second matrix product. The bits are the same. A fraction such as 0.5,
    with `compile` only: a compiled block keeps that much of what it would, and computes again what
    is cheapest. None: all are kept."""
    offload: OffloadConfig | None = None
    """`OffloadConfig()`: what blocks keep for backward waits in the host's memory: their inputs
    with `recompute="full"`, all that autograd saves without; what `selective` keeps stays. The bits
    are the same. None: all stays on the device."""
    reduction: Literal["exact", "fast"] = "exact"
    """`exact`: lanes are summed in one fixed tree, the same bits at any number of replicas. `fast`:
    a plain all-reduce, only with determinism `fast`."""
    determinism: Literal["strict", "fast"] = "strict"
    """`strict`: each worker computes the same bits from the same inputs, and an operator that
    cannot raises. `fast`: what is quickest, TF32 included. See the page on bits."""
    compile: Literal["off", "on", "require"] = "off"
    """`on`: torch.compile makes kernels of each repeated block, of `CausalLM`'s loss, of the update
    of bfloat16 state, and of sums of bfloat16 gradients where `shard` is 1; what it cannot take is
    computed as it is, on all workers, with a warning. `require`: that ends the run. See the page on
    bits."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the sum over lanes and replicas. `bfloat16`: each lane's gradient and each
    sum in the tree are rounded to it, and half as much is sent between replicas."""
    bucket_bytes: int | None = None
    """The most bytes of float32 gradient that are reduced over replicas at once, at least 1024;
    None: 16 MiB on a CPU, 64 MiB on a GPU. No bit depends on it."""
    gather_ahead: int = 1
    """Blocks whose whole parameters are gathered ahead of the one at work, where `shard` is above
    1. 1: the next one, in FSDP2's own way. Each further one takes a block's parameters in memory
    (in `precision`), and helps where a block takes longer to gather than to compute. No bit depends
    on it."""
    lane_buffers: int | None = None
    """The most flat float32 gradients that a GPU holds; lanes beyond that wait in the host's
    memory. None: as many as a replica needs while all replicas are there; one that takes over
    lanes of a lost one then needs no more GPU memory. A larger number is faster while replicas are
    missing. No bit depends on it."""
    seed: int = 0
    """Seeds the weights, the order of the samples and dropout."""
    eval_every: int | None = None
    """Steps between evaluations on the held-out data; None: at the end only."""
    eval_samples: int = 256
    """Held-out samples that an evaluation looks at, at most."""
    profile: Steps | None = None
    """Steps that torch's profiler looks at, such as `Steps(10, 13)`, on the lead (the first worker
    of the first replica): a trace in `profile/` of the run directory, the dearest operators in the
    report."""

    def __post_init__(self) -> None:
        check_types(self, "train")
        check_optimizer(self.optimizer)
        self._check_task()
        self._check_converters()

    def _check_task(self) -> None:
        """By the methods that make it one; a job's settings have none."""
        task = self.task
        if task is None or (wrong := _no_object_with(task, "prepare", "build")) is None:
            return
        raise ConfigError(
            "train.task",
            type_name(task),
            f"not a task: {wrong}",
            "Use CausalLM(...) or CustomTask(...)",
        )

    def _check_converters(self) -> None:
        given: object = self.converters
        if isinstance(given, list):
            object.__setattr__(self, "converters", tuple(given))
        elif not isinstance(given, tuple):
            raise ConfigError(
                "train.converters",
                given,
                f"of type {type_name(given)}, not a tuple",
                "Use (converter,), with the comma, also for a single one",
            )
        for one in self.converters:
            if (wrong := _no_object_with(one, "convert")) is not None:
                raise ConfigError(
                    "train.converters",
                    type_name(one),
                    f"not a converter: {wrong}",
                    "Use objects such as Float8()",
                )

    def lane_samples(self, lanes: int) -> int:
        """Samples of one step in one lane on one shard rank."""
        return self.global_batch // (lanes * self.parallel.shard)

    def micro_samples(self, lanes: int) -> int:
        """Samples of one micro-batch on one worker."""
        return self.micro_batch or self.lane_samples(lanes)

    def check(self, lanes: int) -> None:
        """Checks every number that does not need the model or the data.

        Args:
            lanes: the number of lanes in force (`lanes`, or what the scaling config implies).

        Raises:
            ConfigError: naming the field, the value and the fix.
        """
        for name, value in [
            ("steps", self.steps),
            ("global_batch", self.global_batch),
            ("lanes", lanes),
            ("eval_samples", self.eval_samples),
            ("gather_ahead", self.gather_ahead),
            ("lane_buffers", 1 if self.lane_buffers is None else self.lane_buffers),
            ("eval_every", 1 if self.eval_every is None else self.eval_every),
            ("recompute", self.recompute if isinstance(self.recompute, int) else 1),
        ]:
            if value < 1:
                raise ConfigError(f"train.{name}", value, "must be at least 1", "Use 1 or more")
        if self.determinism == "strict" and self.reduction == "fast":
            raise ConfigError(
                "train.reduction",
                self.reduction,
                "its sums depend on the number of replicas, and train.determinism is 'strict'",
                "Use 'exact', or determinism='fast'",
            )
        if self.bucket_bytes is not None and self.bucket_bytes < _LEAST_BUCKET_BYTES:
            raise ConfigError(
                "train.bucket_bytes",
                self.bucket_bytes,
                f"a bucket has {_LEAST_BUCKET_BYTES} bytes or more",
                "Use some MiB, or None for the device's default",
            )
        if self.prefetch < 0:
            raise ConfigError(
                "train.prefetch", self.prefetch, "fewer than none", "Use 0 (none) or more"
            )
        if self.profile is not None and self.profile.last >= self.steps:
            raise ConfigError(
                "train.profile.last",
                self.profile.last,
                f"the last step is {self.steps - 1}",
                f"Use {self.steps - 1} or less, or raise train.steps",
            )
        self._check_fraction()
        self.parallel.check(self)
        self._check_batch(lanes)
        self.optimizer.check()
        check_settings(self.optimizer, self.steps)

    def _check_fraction(self) -> None:
        fraction = self.recompute
        if not isinstance(fraction, float):
            return
        if not 0 < fraction < 1:
            raise ConfigError(
                "train.recompute",
                fraction,
                "a fraction of what a block keeps is above 0 and below 1",
                "Use 0.5 or so, 'full' to keep nothing, or a whole number n for each n-th block",
            )
        if self.compile == "off":
            raise ConfigError(
                "train.recompute",
                fraction,
                "only compiled blocks can keep a fraction, and train.compile is 'off'",
                "Use compile='on', or recompute 'full', 'selective' or a whole number",
            )

    def _check_batch(self, lanes: int) -> None:
        streams = lanes * self.parallel.shard
        if self.global_batch % streams:
            down, up = (
                self.global_batch // streams * streams,
                -(-self.global_batch // streams) * streams,
            )
            raise ConfigError(
                "train.global_batch",
                self.global_batch,
                f"{lanes} lanes x {self.parallel.shard} shard ranks = {streams} do not divide it",
                f"Use a multiple of {streams}, such as {f'{down} or {up}' if down else up}",
            )
        per_worker = self.lane_samples(lanes)
        if self.micro_batch is not None and (self.micro_batch < 1 or per_worker % self.micro_batch):
            raise ConfigError(
                "train.micro_batch",
                self.micro_batch,
                f"it does not divide the {per_worker} samples that a worker has in a lane "
                f"(global_batch {self.global_batch} / {streams})",
                f"Use a divisor of {per_worker}, or None for all of them at once",
            )


def _no_object_with(value: object, *methods: str) -> str | None:
    """Why a value is no object that has one of these methods; None: it is."""
    if isinstance(value, type):
        return f"{value.__name__} is a class, not an object of it"
    if not any(hasattr(value, name) for name in methods):
        return f"it has no method {methods[0]}"
    return None
