"""Trains a model of your own, with a loss and a dataset of your own, and shows a recovery.

    python examples/custom_task.py --fault kill@20

`CustomTask` takes any `nn.Module`, a function that gives the summed loss and the number of its
terms, and a map-style dataset. Here: a small network tells three interleaved spirals apart. The
points are generated from a seed, so nothing is downloaded. The last line is `RESULT ` and a JSON
object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elastic import (
    CheckpointConfig,
    CustomTask,
    ElasticTrainer,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    parse_faults,
)

ARMS = 3
HIDDEN = 64
REPORTED = ("steps", "first_loss", "final_loss", "val_loss", "faults_fired", "lost_steps")


def spirals(count: int, seed: int) -> TensorDataset:
    """`count` points, each on one of three spirals, with the number of its spiral.

    Shapes: a sample is (point, arm): float32 (2,) and int64 ().
    """
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(ARMS, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    noise = 0.15 * torch.randn(count, generator=generator)
    angle = 2 * math.pi * (radius + arm / ARMS) + noise
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm)


def build_model() -> nn.Module:
    """The whole model on the CPU. Its random numbers come from torch alone, which is seeded."""
    return nn.Sequential(
        nn.Linear(2, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, ARMS),
    )


def loss_function(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """The summed loss of a batch and how many terms are in the sum. A mean would not do: the
    batch is only a part of the global one."""
    points, arms = batch
    return cross_entropy(model(points), arms, reduction="sum"), arms.numel()


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="optimizer steps")
    add("--replicas", type=int, default=2, help="replicas with all machines there")
    add("--spares", type=int, default=1, help="workers waiting to take a lost one's place")
    add(
        "--fault",
        default="none",
        help="none, or KIND@STEP[.PHASE][:WORKER[+WORKER]], several with commas; KIND is kill, "
        "freeze, raise, flip, glitch or loop (elastic/protocol/faults.py says more)",
    )
    add("--storage", default="runs", help="directory for runs, seen by all nodes")
    add("--name", default="custom_task", help="name of the run; the same name continues it")
    add("--resume", choices=["auto", "never", "must"], default="auto", help="never starts anew")
    return parser.parse_args(arguments)


def build_trainer(options: argparse.Namespace) -> ElasticTrainer:
    """The run that the command line asks for."""
    task = CustomTask(
        build_model=build_model,
        loss_function=loss_function,
        dataset=spirals(3000, seed=0),
        eval_dataset=spirals(256, seed=1),
    )
    return ElasticTrainer(
        TrainConfig(
            task=task,
            steps=options.steps,
            global_batch=64 * options.replicas,
            optimizer=OptimizerConfig(lr=0.02, warmup_steps=min(20, options.steps // 5)),
        ),
        scaling=ScalingConfig(max_replicas=options.replicas, spares=options.spares),
        run_config=RunConfig(name=options.name, storage_path=str(Path(options.storage).absolute())),
        checkpoint=CheckpointConfig(resume=options.resume),
        faults=parse_faults(options.fault),
    )


def start_ray(options: argparse.Namespace) -> None:
    """Joins the cluster that this is a job of, or starts a small one on this machine."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
        return
    workers = options.replicas + options.spares
    if "KUBERNETES_SERVICE_HOST" not in os.environ:  # the kernel's chooses better, but in a pod
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False)


def main(arguments: list[str]) -> None:
    """Runs the example. No error is caught: one that no retry can help gives exit status 93."""
    options = parse_arguments(arguments)
    trainer = build_trainer(options)
    start_ray(options)
    result = trainer.fit()
    metrics = dict(result.metrics or {})
    print("RESULT " + json.dumps({key: metrics[key] for key in REPORTED}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
