"""Gradients of one micro-batch for each worker, in layouts of as many workers, on real processes;
and what a plain model makes of the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy

from tests.support.data_plane import make_engine
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.tasks.causal_lm import PreparedCausalLM

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, and what it computes."""

    task: PreparedCausalLM
    train: TrainConfig


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a case came to."""

    loss: float
    """Sum over all workers but tensor peers."""
    targets: int
    """Likewise."""
    gradients: Gradients
    """By the parameter's name, put together from the workers' slices."""


def gradients_of(cases: Sequence[Case], samples: int) -> list[Found]:
    """One micro-batch of `samples` in each shard rank, for each case after the other, on the same
    processes; these take other places in each case."""
    workers = cases[0].train.parallel.workers
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(
            _process,
            args=(store.port, cases, samples, results),
            nprocs=workers,
            start_method="forkserver",
        )
        return [_joined([results[i, rank] for rank in range(workers)]) for i in range(len(cases))]


def _process(number: int, port: int, cases: Sequence[Case], samples: int, results: Any) -> None:
    torch.set_num_threads(1)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    for index, case in enumerate(cases):
        rank = (number + index) % case.train.parallel.workers
        results[index, rank] = _one(rank, index, meet, case, samples)
        leave_replica_group()


def _one(rank: int, formation: int, meet: Rendezvous, case: Case, samples: int) -> Any:
    engine = make_engine(rank, meet, case.task, case.train, formation=formation)
    flat = torch.zeros_like(engine.gradient)
    engine.collect_in(flat)
    data: Any = case.task.train_data()
    ids = np.arange(samples) + samples * engine.slot.shard
    loss, targets = case.task.loss(engine.model, engine.take(data.batch(ids)))
    engine.backward_at_last(loss, lambda count: None)
    slices = engine._slices
    local = {
        name: (slices[name].offsets, slices[name].sizes, slices[name].global_shape, view.clone())
        for name, view in zip(engine.layout.names, engine.layout.views(flat), strict=True)
    }
    counts = engine.slot.tensor == 0
    return float(loss) * counts, targets * counts, local


def _joined(workers: list[Any]) -> Found:
    full: Gradients = {}
    for _, _, local in workers:
        for name, (offsets, sizes, shape, value) in local.items():
            whole = full.setdefault(name, torch.full(shape, float("nan")))
            where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            whole[where] = value.reshape(sizes)
    return Found(
        loss=sum(loss for loss, _, _ in workers),
        targets=sum(targets for _, targets, _ in workers),
        gradients=full,
    )


def plain_gradients(task: PreparedCausalLM, seed: int, texts: Sequence[torch.Tensor]) -> Found:
    """Of transformers' own model in this process, of one text after the other.

    Args:
        task: whose model.
        seed: of the weights.
        texts: each int64, (tokens + 1,): a text that sees no other.
    """
    model, source = task.build(seed)
    network: Any = model
    network.config._attn_implementation = "sdpa"
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    values = {
        n: source.read(n, tuple(p.shape), (0,) * p.dim(), tuple(p.shape))
        for n, p in model.named_parameters()
    }
    model.to_empty(device="cpu")
    model.load_state_dict(values, strict=False)
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])
    total = torch.zeros(())
    for text in texts:
        logits = network(input_ids=text[None, :-1]).logits[0]
        total = total + cross_entropy(logits, text[1:], reduction="sum")
    total.backward()
    return Found(
        loss=total.item(),
        targets=sum(len(text) - 1 for text in texts),
        gradients={n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )
