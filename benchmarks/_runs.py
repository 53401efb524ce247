"""The toy run on Ray, ours and Ray Train's, and hooks to break them while they go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._toy import BATCH, PacedLoss, build_model, dataset


class Meanwhile:
    """Does something in a thread of its own while the main one is in `fit`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self._work = work
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.result = self._work()

    def __enter__(self) -> Meanwhile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def run_elastic(directory: Path, *, workers: int, spares: int, steps: int, step_s: float) -> None:
    """ElasticTrainer, used as anybody would: replicas of one worker, in the run `directory/run`."""
    from ray.train import RunConfig

    from elastic import (
        CheckpointConfig,
        CustomTask,
        ElasticTrainer,
        OptimizerConfig,
        ScalingConfig,
        TrainConfig,
    )

    task = CustomTask(build_model=build_model, loss_function=PacedLoss(step_s), dataset=dataset())
    trainer = ElasticTrainer(
        TrainConfig(
            task=task,
            steps=steps,
            global_batch=BATCH * workers,
            optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2),
        ),
        scaling=ScalingConfig(max_replicas=workers, spares=spares),
        run_config=RunConfig(name="run", storage_path=str(directory)),
        checkpoint=CheckpointConfig(every_steps=10, resume="never"),
    )
    trainer.fit()


def run_ray_train(
    directory: Path, *, workers: int, steps: int, step_s: float, max_failures: int
) -> None:
    """Stock Ray Train with DDP; its workers write traces to `directory/traces`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from benchmarks._ddp_peer import train_on_ray

    trainer = TorchTrainer(
        train_on_ray,
        train_loop_config={
            "traces": str(directory / "traces"),
            "steps": steps,
            "step_s": step_s,
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(directory),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    trainer.fit()
