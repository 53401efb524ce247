"""The loops that take turns, each as a process that starts its workers.

All get the same prepared task, a `GatedLM`, and train until they are ended, with one thread each.

    run_elastic   ElasticTrainer on a Ray cluster of its own
    run_workers   one of these, on processes alone:
        train_alone   a plain loop on one worker
        train_fsdp2   a plain loop on FSDP2
        train_ours    the trainer's own engine and loop
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._common import end_properly, ray_cluster

TrainWorker = Callable[[int, int, Any, Any, int], None]
"""A worker of a loop: its number, the port of the store, the task, the settings, the replicas."""


class IdleActor:
    """What an actor costs that does nothing."""


def run_elastic(directory: Path, task: Any, train: Any, replicas: int, reduction: str) -> None:
    """ElasticTrainer as anybody would use it, on a Ray cluster of its own; defaults but for the
    checkpoints, of which there are none."""
    import ray
    from ray.train import RunConfig

    from elastic import CheckpointConfig, ElasticTrainer, ScalingConfig

    _begin(directory)
    trainer = ElasticTrainer(
        dataclasses.replace(train, task=task, reduction=reduction),
        scaling=ScalingConfig(max_replicas=replicas),
        run_config=RunConfig(name="run", storage_path=str(directory)),
        checkpoint=CheckpointConfig(every_steps=None, resume="never"),
    )
    with ray_cluster(replicas * train.parallel.workers):
        # It lives while it is referred to.
        idle = ray.remote(IdleActor).options(num_cpus=0).remote()
        trainer.fit()
        del idle


def run_workers(
    directory: Path, train_worker: TrainWorker, task: Any, train: Any, replicas: int
) -> None:
    """Starts the workers of a loop, which meet at a store of this process."""
    import torch.distributed as dist

    _begin(directory)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(
            target=train_worker, args=(index, store.port, task, train, replicas), daemon=True
        )
        for index in range(replicas * train.parallel.workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _begin(directory: Path) -> None:
    """What the process and those below it print goes to a file. Ray would start its workers with a
    lower priority than others have."""
    end_properly()
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.environ.update(OMP_NUM_THREADS="1", RAY_worker_niceness="0")


def train_ours(index: int, port: int, task: Any, train: Any, replicas: int) -> None:
    """A worker of the trainer's own loop, with nobody to tell anything."""
    import torch

    from tests.support.measured_peak import make_loop
    from trainer.backend import determinism
    from trainer.backend.rendezvous import Rendezvous

    torch.set_num_threads(1)
    determinism.settle(train.determinism, "cpu", os.environ)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=3600)
    make_loop(index, meet, task, train, replicas).run()


def train_fsdp2(index: int, port: int, task: Any, train: Any, replicas: int) -> None:
    """A worker of the FSDP2 loop that one would write without fault tolerance."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from trainer.models.family import HUGGING_FACE

    torch.set_num_threads(1)
    shard = train.parallel.shard
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=index, world_size=replicas * shard)
    mesh = init_device_mesh("cpu", (replicas, shard), mesh_dim_names=("replicate", "shard"))
    if replicas == 1:
        mesh = mesh["shard"]  # without a sum over one replica
    model, source = task.build(train.seed)
    for name in HUGGING_FACE.blocks(model):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train_plain(model, source, index, task, train, replicas)


def train_alone(index: int, port: int, task: Any, train: Any, replicas: int) -> None:
    """The only worker of the loop that one would write for one process."""
    import torch

    torch.set_num_threads(1)
    model, source = task.build(train.seed)
    _train_plain(model, source, index, task, train, replicas)


def _train_plain(model: Any, source: Any, index: int, task: Any, train: Any, replicas: int) -> None:
    """The steps of a plain loop, with a model on the meta device that is sharded or not."""
    import torch
    import torch.distributed as dist

    from trainer.loop.samples import lane_ids
    from trainer.parallel.apply import fill, local_slices, materialize
    from trainer.parallel.layout import Slot

    settings = train.optimizer
    replica, rank = divmod(index, train.parallel.shard)
    slices = local_slices(model, Slot(replica=replica, rank=rank, dims=train.parallel.dims))
    materialize(model, torch.device("cpu"))
    fill(model, slices, source)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in params if p.dim() >= 2],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    data = task.train_data()
    for step in range(train.steps):
        ids = lane_ids(train, replicas, len(data), step, replica, rank)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, train.steps)
        loss, terms = task.loss(model, data.batch(ids))
        (loss / terms).backward()
        mean = torch.tensor([float(loss.detach()) / terms])
        torch.nn.utils.clip_grad_norm_(params, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if dist.is_initialized():
            dist.all_reduce(mean)  # the loss that an ordinary loop logs
