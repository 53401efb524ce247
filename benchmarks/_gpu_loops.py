"""The systems of the GPU benchmark, each for a process of its own, which it has to itself.

A step ends when its loss is on the host: all wait for the device once in a step, as a loop that
logs does.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks._gpu_kernels import kernel_times
from benchmarks._gpu_models import Workload, draw_weights
from benchmarks._gpu_overlap import hidden_share
from benchmarks._random_text import RandomText, prepared
from tests.support.fabric import GLOO, NCCL, FabricGroup
from trainer.backend import determinism
from trainer.backend.groups import make_replica_group, torch_device
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.loop.link import Link, LoopConfig, NoLink, Progress
from trainer.loop.steps import TrainLoop
from trainer.parallel.compiled import keep_compiled
from trainer.parallel.layout import ParallelDims, Slot
from trainer.replication.step_commit import Commit

Tell = Callable[[dict[str, Any]], None]
"""Takes what a process has found so far: numbers that it has not told yet, or newer ones."""
_KIB = 1024


class Skipped(Exception):
    """A system cannot run here, with the reason."""


@dataclass
class Pace(NoLink):
    """Notes when each step is committed."""

    ends_s: list[float] = field(default_factory=list)
    loss: float = 0.0

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""
        self.ends_s.append(time.perf_counter())
        self.loss = commit.loss


class OurLoop:
    """The real engine and loop, as the only worker of the only replica, without Ray.

    Args:
        work: what a step does.
        steps: of the whole run.
    """

    def __init__(self, work: Workload, steps: int) -> None:
        self.train = replace(work.train(steps), task=prepared(work.train(steps)))
        determinism.settle(self.train.determinism, work.device, os.environ)
        if work.compile != "off":
            keep_compiled(os.environ, torch.get_num_threads())
        self._fabric = NCCL if work.device == "cuda" else GLOO
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._meet = Rendezvous(host="127.0.0.1", port=self._store.port, timeout_s=60)
        mesh = make_replica_group(
            self._meet, "replica", rank=0, dims=ParallelDims(), device=work.device
        )
        self.engine = Engine(
            self.train.task,
            self.train,
            slot=Slot(replica=0, rank=0, dims=ParallelDims()),
            mesh=mesh,
            device=work.device,
            max_replicas=1,
        )
        draw_weights(self.engine.model)
        self.engine.forget_initial_weights()
        self._sums = self.engine.make_sums(1, 1)
        self.progress = Progress()

    def run(self, link: Link, steps: int, *, snapshot_every: int | None = None) -> None:
        """Does so many more steps."""
        cross = FabricGroup(
            self._fabric,
            self._meet,
            "cross",
            lanes=[(0,)],
            total_lanes=1,
            rank=0,
            leave_now=lambda: False,
        )
        config = LoopConfig(
            lanes=1,
            save_every=None,
            snapshot_every=snapshot_every,
            compare_every=None,
            max_nonfinite_steps=100,
            until=self.progress.step + steps,
        )
        TrainLoop(
            self.engine,
            cross,
            self._sums,
            lanes=(0,),
            progress=self.progress,
            config=config,
            link=link,
        ).run()


def train_ours(tell: Tell, work: Workload, steps: int, trace: bool) -> None:
    """Ours; where activations are offloaded to the host, always with the trace that tells how much
    of the copying is hidden."""
    loop, pace = OurLoop(work, steps + 2), Pace()
    loop.run(pace, steps)
    tell(found(work, pace.ends_s, pace.loss))  # before the trace, which may fail
    if trace or work.offload is not None:
        tell(look_at(work, lambda: loop.run(NoLink(), 1)))


def look_at(work: Workload, step: Callable[[], object]) -> dict[str, Any]:
    """Does one more step, and tells where the device's time went."""
    with profile(activities=activities_on(work)) as running:
        step()
        if work.device == "cuda":
            torch.cuda.synchronize()
    return read_trace(running)


def activities_on(work: Workload) -> list[ProfilerActivity]:
    """What a trace records."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if work.device == "cuda" else [])]


def read_trace(of_a_step: profile) -> dict[str, Any]:
    """See `kernel_times` and `hidden_share`."""
    events = of_a_step.events()
    return {"kernels": kernel_times(events), "hidden": hidden_share(events)}


def train_plain(tell: Tell, work: Workload, steps: int, trace: bool) -> None:
    """The loop that one would write on FSDP2 without fault tolerance, on a mesh of one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from trainer.models.family import HUGGING_FACE
    from trainer.parallel.compiled import compile_blocks
    from trainer.parallel.recompute import recompute_blocks

    train = work.train(steps + 1)
    task, device = prepared(train), torch_device(work.device)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = "nccl" if work.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    mesh = init_device_mesh(work.device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, train.precision))
    model = task.build(0)[0]
    blocks = HUGGING_FACE.blocks(model)
    for param in model.parameters():  # AdamW's moments are what they are
        param.data = param.data.to(getattr(torch, work.state))
    budget = work.recompute if isinstance(work.recompute, float) else None
    if work.recompute is not None and not isinstance(work.recompute, float):
        recompute_blocks(model, blocks, work.recompute)
    if work.compile != "off":  # as the loss is then, by the task
        compile_blocks(model, blocks, required=True, budget=budget)
    for name in blocks:
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    materialize_whole(model, device)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=train.optimizer.rate(1, steps + 1), fused=True)
    data, ends_s, mean = task.train_data(), list[float](), 0.0

    def take(step: int) -> float:
        total = torch.zeros((), device=device)
        for start in range(0, work.samples, work.micro):
            first = step * work.samples + start
            batch = data.batch(range(first, first + work.micro)).to(device, non_blocking=True)
            loss, _ = task.loss(model, batch)
            (loss / work.tokens).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / work.tokens

    for step in range(steps):
        mean = take(step)
        ends_s.append(time.perf_counter())
    tell(found(work, ends_s, mean))
    if trace:
        tell(look_at(work, lambda: take(steps)))


def materialize_whole(model: Any, device: torch.device) -> None:
    """Gives a model on the meta device memory, weights, and its tables of positions."""
    from trainer.parallel.apply import materialize

    materialize(model, device)
    draw_weights(model)
    model.train()


def train_hugging_face(tell: Tell, work: Workload, steps: int, trace: bool) -> None:
    """transformers' Trainer, with its fused AdamW.

    Raises:
        Skipped: accelerate, which it needs, is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise Skipped("accelerate is not installed, and transformers' Trainer needs it")
    import tempfile

    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback
    from transformers import TrainingArguments as Arguments

    ends_s: list[float] = []
    one_more = profile(activities=activities_on(work))

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if len(ends_s) == steps:
                one_more.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if work.device == "cuda":
                torch.cuda.synchronize()
            if len(ends_s) == steps:
                one_more.stop()
                tell(read_trace(one_more))
                return
            ends_s.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, **told: Any) -> None:
            if state.global_step == steps and "loss" in told["logs"]:
                tell(found(work, ends_s, told["logs"]["loss"]))

    config = dict(prepared(work.train(2)).config)
    with torch.device(torch_device(work.device)):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with tempfile.TemporaryDirectory() as directory:
        arguments = Arguments(
            output_dir=directory,
            max_steps=steps + trace,
            per_device_train_batch_size=work.micro,
            gradient_accumulation_steps=work.samples // work.micro,
            bf16=work.device == "cuda",
            use_cpu=work.device == "cpu",
            optim="adamw_torch_fused",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        )
        data = _Labelled(work.seq_len, config["vocab_size"])
        Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()


class _Labelled(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random text as transformers' Trainer wants it: the model shifts the labels itself."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        self._text = RandomText(seq_len - 1, vocab_size)

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        tokens = self._text[sample]
        return {"input_ids": tokens, "labels": tokens}


def found(work: Workload, ends_s: list[float], loss: float) -> dict[str, Any]:
    """What a system did: the time of each step but the first two, which warm up."""
    spans = [later - sooner for sooner, later in pairwise(ends_s[1:])]
    return {"step_s": spans, **memory(work), "loss": loss}


def memory(work: Workload) -> dict[str, int]:
    """The most that tensors have taken of a GPU, the most that the allocator has held for them, and
    what is taken of it now: that, the context, NCCL's and the libraries' own. On a CPU the peak of
    the process."""
    if work.device == "cpu":
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": total - free,
    }


MEMORY = ("peak_bytes", "reserved_bytes", "device_bytes")
"""Keys of `memory`."""

SYSTEMS: dict[str, Callable[[Tell, Workload, int, bool], None]] = {
    "plain": train_plain,
    "hugging_face": train_hugging_face,
    "ours": train_ours,
}
