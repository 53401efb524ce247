"""The two loops of the overhead benchmark, each as a process that it starts.

Both get the same prepared task, a `GatedLM`, and train until they are ended.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks._common import end_properly, ray_cluster

REPLICAS = 2


class IdleActor:
    """What an actor costs that does nothing."""


def run_elastic(directory: Path, task: Any, train: Any, reduction: str) -> None:
    """ElasticTrainer as anybody would use it, on a Ray cluster of its own; defaults but for the
    checkpoints, of which there are none."""
    import ray
    from ray.train import RunConfig

    from elastic import CheckpointConfig, ElasticTrainer, ScalingConfig

    _begin(directory)
    trainer = ElasticTrainer(
        dataclasses.replace(train, task=task, reduction=reduction, determinism="fast"),
        scaling=ScalingConfig(max_replicas=REPLICAS),
        run_config=RunConfig(name="run", storage_path=str(directory)),
        checkpoint=CheckpointConfig(every_steps=None, resume="never"),
    )
    with ray_cluster(REPLICAS * train.parallel.workers):
        # It lives while it is referred to.
        idle = ray.remote(IdleActor).options(num_cpus=0).remote()
        trainer.fit()
        del idle


def run_plain(directory: Path, task: Any, train: Any) -> None:
    """Starts the processes of the plain loop."""
    import torch.distributed as dist

    _begin(directory)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=train_plain, args=(index, store.port, task, train), daemon=True)
        for index in range(REPLICAS * train.parallel.workers)
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


def train_plain(index: int, port: int, task: Any, train: Any) -> None:
    """A worker of the loop that one would write without fault tolerance."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from trainer.loop.samples import lane_ids
    from trainer.models.family import HUGGING_FACE
    from trainer.parallel.apply import fill, local_slices, materialize
    from trainer.parallel.layout import Slot

    torch.set_num_threads(1)
    shard, settings = train.parallel.shard, train.optimizer
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=index, world_size=REPLICAS * shard)
    mesh = init_device_mesh("cpu", (REPLICAS, shard), mesh_dim_names=("replicate", "shard"))
    model, source = task.build(train.seed)
    for name in HUGGING_FACE.blocks(model):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    replica, rank = divmod(index, shard)
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
        ids = lane_ids(train, REPLICAS, len(data), step, replica, rank)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, train.steps)
        loss, terms = task.loss(model, data.batch(ids))
        (loss / terms).backward()
        mean = torch.tensor([float(loss.detach()) / terms])
        torch.nn.utils.clip_grad_norm_(params, settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)  # the loss that an ordinary loop logs
