from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ray import cloudpickle
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic import ParallelConfig, ScalingConfig
from elastic.driver.memory import check_memory, plan_memory
from elastic.driver.preparing import prepare_task
from tests.support.small_llama import small_train
from trainer.config import OffloadConfig, TrainConfig
from trainer.dryrun.judge import Judge
from trainer.dryrun.machines import MACHINES, Machine
from trainer.errors import ConfigError
from trainer.models.init import WeightSource
from trainer.tasks.custom import CustomTask

ONE = ScalingConfig(max_replicas=1, device="cuda")


@pytest.fixture
def train() -> TrainConfig:
    """Activations and logits of some 2 GB, in which all else is lost."""
    return small_train(global_batch=128)


@pytest.fixture
def memory_bytes(train: TrainConfig) -> int:
    """What the layout needs by a dry run."""
    judge = Judge(device="cuda", machine=MACHINES["p5"], nodes=None)
    return judge.judge(train, 1).needed_bytes


def small_gpus(monkeypatch: pytest.MonkeyPatch, size_bytes: float) -> None:
    small = Machine(name="p5", gpus=8, memory_bytes=int(size_bytes))
    monkeypatch.setitem(MACHINES, "p5", small)


def test_the_smallest_gpu_counts() -> None:
    for kinds, name in (
        (["H100", "H200"], "p5"),
        (["A100-40G"], "p4d"),
        (["B200", "B300"], "p6-b200"),
    ):
        machine = plan_memory(kinds, 8)
        assert machine is not None and machine.memory_bytes == MACHINES[name].memory_bytes
    assert plan_memory(["H100", "L4"], 8) is None
    assert plan_memory([], 0) is None


def test_the_rest_of_a_machine_is_not_that_of_an_instance() -> None:
    """Its GPUs are as many as Ray counts, and nobody knows its own memory."""
    machine = plan_memory(["H200"], 1)
    assert machine is not None
    assert (machine.gpus, machine.host_memory_bytes) == (1, None)


def test_what_is_offloaded_is_not_held_against_an_instance(
    train: TrainConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = replace(MACHINES["p5"], host_memory_bytes=1)
    monkeypatch.setitem(MACHINES, "p5", tiny)
    offload = OffloadConfig(least_bytes=2**16)
    offloads = replace(train, global_batch=4, recompute="full", offload=offload)
    judge = Judge(device="cuda", machine=tiny, nodes=None)
    assert judge.judge(offloads, 1).memory_refused, "where it is known to be such an instance"
    check_memory(offloads, ONE, ["H100"], 8)
    assert caplog.text == ""


def test_what_is_too_large_is_refused_with_a_change_that_fits(
    train: TrainConfig, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_gpus(monkeypatch, memory_bytes / 1.15)
    with pytest.raises(ConfigError, match=r"by a dry run a worker needs .* GB of") as error:
        check_memory(train, ONE, ["H100"], 8)
    assert error.value.field == "train.parallel"
    # Logits, what the loss makes of them, and their gradient: 128 samples of 128 tokens.
    assert f"logits {3 * 128 * 128 * 4096 * 4 / 1e9:.1f}" in error.value.fact
    assert 'Use recompute="full"' in error.value.fix


def test_what_may_not_fit_is_warned_of(
    train: TrainConfig,
    memory_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    small_gpus(monkeypatch, memory_bytes / 1.05)
    check_memory(train, ONE, ["H100"], 8)
    assert "a worker may not fit: by a dry run it needs" in caplog.text


@pytest.mark.parametrize("recompute", [None, 0.5])
def test_compiled_blocks_need_what_they_keep(
    recompute: float | None,
    train: TrainConfig,
    memory_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a compiled loss, which has no logits in float32: most of what this one needs."""
    small_gpus(monkeypatch, memory_bytes / 1.2)
    with pytest.raises(ConfigError, match="by a dry run a worker needs"):
        check_memory(train, ONE, ["H100"], 8)
    check_memory(replace(train, compile="on", recompute=recompute), ONE, ["H100"], 8)


def test_what_fits_or_cannot_be_known_is_let_through(
    train: TrainConfig, memory_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_memory(train, ONE, ["H100"], 8)
        assert caplog.text == ""
        check_memory(train, ONE, ["H100", "a GPU of tomorrow"], 8)
        assert "no dry run: the memory of these GPUs is not in its table" in caplog.text
        check_memory(replace(train, task=None), ONE, ["H100"], 8)
    assert "no dry run: AttributeError" in caplog.text


def test_workers_that_share_a_gpu_have_a_part_of_it(
    train: TrainConfig, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_gpus(monkeypatch, memory_bytes / 0.8)
    check_memory(train, ONE, ["H100"], 8)
    with pytest.raises(ConfigError, match="by a dry run a worker needs"):
        check_memory(train, replace(ONE, gpus_per_worker=0.5), ["H100"], 8)
    assert MACHINES["p5"].shared(0.5).gpus == 16
    assert MACHINES["p5"].shared(0.8).gpus == 8, "Ray has no worker on two GPUs"
    assert MACHINES["p5"].shared(1 / 3).gpus == 24


def test_a_driver_that_is_in_a_process_group_is_told_that_nothing_was_tried(
    train: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with caplog.at_level(logging.WARNING):
            check_memory(train, ONE, ["H100"], 8)
    finally:
        dist.destroy_process_group()
    assert "no dry run: this process is in a process group" in caplog.text


def test_settings_that_cannot_work_are_refused(train: TrainConfig) -> None:
    three = replace(train, parallel=ParallelConfig(tensor=3))
    with pytest.raises(ConfigError, match="it does not divide"):
        check_memory(three, ONE, ["H100"], 8)


class Opened(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that open what does not cross to a worker in the first read."""

    lock: threading.Lock | None = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, sample: int) -> torch.Tensor:
        self.lock = self.lock or threading.Lock()
        return torch.full((8,), float(sample))


def test_a_dry_run_leaves_a_task_as_the_workers_get_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum(), len(batch)

    data = Opened()
    task = CustomTask(build_model=lambda: nn.Linear(8, 8), loss_function=loss, dataset=data)
    train = TrainConfig(task=task, steps=2, global_batch=16, lanes=1)
    prepared = prepare_task(train, str(tmp_path))
    assert data.lock is not None, "it was tried"
    check_memory(train, ONE, ["H100"], 8, prepared)
    assert caplog.text == ""
    cloudpickle.dumps(prepared)


class OnlyOnGpus:
    """A converter that refuses what its kernels do not run on."""

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        return model, source

    def check(self, model: nn.Module, train: TrainConfig, device: torch.device | None) -> None:
        if device is not None and device.type != "cuda":
            raise ConfigError("train.converters", device, "it runs on GPUs", "Use GPUs")


def test_a_dry_run_asks_no_converter_of_the_drivers_device(train: TrainConfig) -> None:
    check_memory(replace(train, converters=(OnlyOnGpus(),)), ONE, ["H100"], 8)
