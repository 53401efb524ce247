"""The task that crosses to the workers: as the user made it, whatever a trial has opened."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn

from elastic import ConfigError
from elastic.driver import preparing
from elastic.driver.preparing import prepare_task
from elastic.ray_compat.kept import most_kept_bytes
from tests.support.small_llama import small_train
from trainer.config import TrainConfig
from trainer.tasks.custom import CustomTask


class Numbers:
    """Bytes of a file, which it opens in its first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file = self.file or self.path.open("rb")
        self.file.seek(index)
        return torch.tensor([float(self.file.read(1)[0])])


def prepared(dataset: Any, cache: Path) -> Any:
    task = CustomTask(
        build_model=lambda: nn.Linear(1, 1),
        loss_function=lambda model, batch: (model(batch).sum(), len(batch)),
        dataset=dataset,
    )
    return prepare_task(TrainConfig(task=task, steps=1, global_batch=1), str(cache))


def test_what_the_trial_opens_does_not_cross(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(4)))
    given = Numbers(path)
    task = prepared(given, tmp_path)
    assert given.file is not None, "the trial has read"
    given.file.close()
    crossing = pickle.loads(pickle.dumps(task.dataset))
    assert crossing.file is None and crossing[3].tolist() == [3.0]
    assert crossing.file is not None
    crossing.file.close()


def test_what_cannot_cross_is_refused_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(4)))
    open_already = Numbers(path)
    open_already[0]
    with pytest.raises(ConfigError, match=r"cannot be sent to the workers: TypeError: .*pickle"):
        prepared(open_already, tmp_path)
    assert open_already.file is not None
    open_already.file.close()


def test_a_dataset_in_memory_that_is_too_large_to_cross_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own bound is half a GiB."""
    assert most_kept_bytes() >= 512 << 20
    monkeypatch.setattr(preparing, "most_kept_bytes", lambda: 24_000_000)
    fits, large = torch.zeros(1_000_000, 1), torch.zeros(3_000_000, 1)
    prepared(fits, tmp_path)
    with pytest.raises(
        ConfigError, match=r"it is 12 MB pickled.* 24 MB at most\. Keep the samples"
    ):
        prepared(large, tmp_path)


@pytest.mark.parametrize(
    ("dataset", "refusal"),
    [
        pytest.param(torch.zeros(3_000_000, 1), "it is 12 MB pickled", id="too large"),
        pytest.param([threading.Lock()], "it cannot be sent to the workers: TypeError", id="lock"),
    ],
)
def test_what_another_task_leaves_is_refused_where_it_does_not_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Any, refusal: str
) -> None:
    monkeypatch.setattr(preparing, "most_kept_bytes", lambda: 24_000_000)
    leaves = CustomTask(
        build_model=lambda: nn.Linear(1, 1),
        loss_function=lambda model, batch: (model(batch).sum(), len(batch)),
        dataset=dataset,
    )
    train = TrainConfig(task=Lasting(leaves), steps=1, global_batch=1)
    with pytest.raises(ConfigError, match=f"CustomTask.*{refusal}"):
        prepare_task(train, str(tmp_path))


class Refuses:
    """A converter that goes with no run."""

    def convert(self, model: nn.Module, source: Any) -> tuple[nn.Module, Any]:
        return model, source

    def check(self, model: nn.Module, train: TrainConfig, device: torch.device | None) -> None:
        raise ConfigError("train.converters", self, "it goes with no run", "Leave it out")


def test_what_the_model_is_refused_for_is_told_before_text_is_read(tmp_path: Path) -> None:
    train = small_train(converters=(Refuses(),))
    with pytest.raises(ConfigError, match="it goes with no run"):
        prepare_task(train, str(tmp_path))


class Lasting:
    """A task that does not cross, and need not: what it prepares does."""

    def __init__(self, crosses: CustomTask) -> None:
        self.crosses, self.lock = crosses, threading.Lock()

    def prepare(self, train: TrainConfig, cache_dir: str) -> CustomTask:
        return self.crosses


def test_a_task_that_leaves_another_one_need_not_cross(tmp_path: Path) -> None:
    crosses = CustomTask(
        build_model=lambda: nn.Linear(1, 1),
        loss_function=lambda model, batch: (model(batch).sum(), len(batch)),
        dataset=[0],
    )
    train = TrainConfig(task=Lasting(crosses), steps=1, global_batch=1)
    assert prepare_task(train, str(tmp_path)) is crosses
