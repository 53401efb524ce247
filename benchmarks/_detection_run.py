"""The run that `benchmarks.detection` breaks: its workers do what files with their process ids say.

    python -m benchmarks._detection_run ADDRESS STORAGE GATE REPLICAS SHARD

While the file `NOISE` stands, a step in twenty takes five times as long on one worker or another,
and some collect garbage, each process compiles something once, and saves take long. It ends by
SIGINT, which saves.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ray.train import RunConfig
from torch import nn

from benchmarks import _detection_store
from elastic import (
    CheckpointConfig,
    CustomTask,
    ElasticTrainer,
    OptimizerConfig,
    ParallelConfig,
    ScalingConfig,
    TrainConfig,
)
from tests.support.black_hole_run import build_wide_model
from tests.support.partition_run import join_cluster

STEPS, BATCH, LANES, SAMPLES, EVAL_EVERY = 100_000, 8, 2, 4096, 200
EVAL_SAMPLES = 64
SAMPLES_OF_WORKER = BATCH // 4
PACE_S = 0.02
"""A sample takes so long: a step of two replicas of two workers some 0.1 s."""
SLOW = 3.0
COMPILE_S = 20.0
"""At least."""
SAVE_EVERY = 500


class Tasks:
    """What this process is to do wrong, by a file that has its id for a name."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self.pace_s = PACE_S
        self._random = random.Random(os.getpid())
        self._evaluated, self._compiled = 0, False

    def take_time(self) -> None:
        """Reading a sample does."""
        slow = self._is_noisy() and self._random.random() < 0.05 / SAMPLES_OF_WORKER
        time.sleep(self.pace_s * (1 + 4 * SAMPLES_OF_WORKER * slow))
        if slow:
            gc.collect()

    def sample(self) -> None:
        """Reads a sample of a step."""
        self.take_time()
        if self._takes("slow"):
            self.pace_s = SLOW * PACE_S
        if self._takes("fast"):
            self.pace_s = PACE_S
        if self._takes("mount"):
            (self._storage / "mount").open().close()  # a FIFO without a writer

    def forward(self, out: torch.Tensor) -> None:
        """In the worker's own code, in forward."""
        if self._takes("raise"):
            raise RuntimeError("a bug that one worker meets")
        if self._takes("hold"):
            sum(range(10**13))  # one call into C, with the interpreter's lock
        if self._takes("loop"):
            while True:
                pass
        if self._takes("backward"):
            out.register_hook(_loop)

    def evaluate(self) -> None:
        """In the worker's own code, with a batch of an evaluation; not in its first one."""
        self._evaluated += 1
        if self._is_noisy() and not self._compiled:
            self._compiled = True
            _compile()
        if self._evaluated * BATCH > EVAL_SAMPLES and self._takes("evaluate"):
            while True:
                pass

    def _is_noisy(self) -> bool:
        return (self._storage / _detection_store.NOISE).exists()

    def _takes(self, task: str) -> bool:
        path = self._storage / f"{task}-{os.getpid()}"
        if not path.exists():
            return False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return True


def _compile() -> None:
    """One thing after the other, as long as it is to take; no cache has them."""
    begun = time.monotonic()
    for number in itertools.count():
        if time.monotonic() - begun > COMPILE_S:
            return
        torch.compiler.reset()
        torch.compile(_made_of(number + 1e4 * os.getpid()))(torch.ones(8))


def _made_of(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x * number).sin()


def _loop(gradient: torch.Tensor) -> None:
    while True:
        pass


class Data:
    """Points on a parabola."""

    def __init__(self, reads: Callable[[], None]) -> None:
        self._reads = reads

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._reads()
        x = torch.tensor([index / SAMPLES])
        return x, x * x


class Loss:
    """Squared errors, summed."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def __call__(
        self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        x, y = batch
        out = model(x)
        if model.training:
            self._tasks.forward(out)
        else:
            self._tasks.evaluate()
        return (out - y).square().sum(), len(x)


def main() -> None:
    """Runs until it is told to stop."""
    storage, _, replicas, shard = join_cluster()
    tasks = Tasks(Path(storage))
    ElasticTrainer(
        TrainConfig(
            task=CustomTask(
                build_model=build_wide_model,
                loss_function=Loss(tasks),
                dataset=Data(tasks.sample),
                eval_dataset=Data(tasks.take_time),
            ),
            steps=STEPS,
            eval_every=EVAL_EVERY,
            eval_samples=EVAL_SAMPLES,
            global_batch=BATCH,
            lanes=LANES,
            parallel=ParallelConfig(shard=shard),
            optimizer=OptimizerConfig(lr=1e-3),
        ),
        scaling=ScalingConfig(max_replicas=replicas, spares=1),
        run_config=RunConfig(name="run", storage_path=storage),
        checkpoint=CheckpointConfig(
            every_steps=SAVE_EVERY, store=f"{_detection_store.SCHEME}://{storage}/checkpoints"
        ),
    ).fit()


if __name__ == "__main__":
    main()
