"""Arguments of a wrong type are refused where the configuration is made, not in a running job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.data.config import DataConfig
from trainer.errors import ConfigError
from trainer.float8.config import Float8
from trainer.models.hf import ModelConfig
from trainer.tasks.causal_lm import CausalLM
from trainer.tasks.custom import CustomTask


class Stream(IterableDataset[int]):
    """Samples without a number."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


def train(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {"task": None, "steps": 1, "global_batch": 1, **changes}
    return TrainConfig(**settings)


def custom(**changes: Any) -> CustomTask:
    settings: dict[str, Any] = {
        "build_model": lambda: nn.Linear(1, 1),
        "loss_function": lambda model, batch: (torch.zeros(()), 1),
        "dataset": [1],
        **changes,
    }
    return CustomTask(**settings)


@pytest.mark.parametrize(
    ("make", "changes", "field"),
    [
        (train, {"steps": "100"}, "train.steps"),
        (train, {"steps": 10.5}, "train.steps"),
        (train, {"steps": True}, "train.steps"),
        (train, {"parallel": {}}, "train.parallel"),
        (train, {"optimizer": {"lr": 1}}, "train.optimizer"),
        (train, {"task": 42}, "train.task"),
        (train, {"task": CausalLM}, "train.task"),
        (train, {"task": nn.Linear(1, 1)}, "train.task"),
        (train, {"converters": Float8()}, "train.converters"),
        (train, {"converters": (Float8,)}, "train.converters"),
        (train, {"converters": ("float8",)}, "train.converters"),
        (train, {"precision": "float16"}, "train.precision"),
        (train, {"reduction": "tree"}, "train.reduction"),
        (OptimizerConfig, {"lr": "3e-4"}, "train.optimizer.lr"),
        (OptimizerConfig, {"warmup_steps": 0.5}, "train.optimizer.warmup_steps"),
        (OptimizerConfig, {"betas": 0.9}, "train.optimizer.betas"),
        (ParallelConfig, {"shard": "2"}, "train.parallel.shard"),
        (DataConfig, {"paths": 5}, "train.task.data.paths"),
        (DataConfig, {"paths": [5]}, "train.task.data.paths"),
        (DataConfig, {"paths": "a", "vocab_size": "4096"}, "train.task.data.vocab_size"),
        (ModelConfig, {"settings": "hidden_size"}, "train.task.model.settings"),
        (ModelConfig, {"pretrained": "yes"}, "train.task.model.pretrained"),
        (CausalLM, {"data": "text", "seq_len": 1}, "train.task.data"),
        (custom, {"info": [1]}, "train.task.info"),
        (custom, {"dataset": Stream()}, "train.task.dataset"),
        (custom, {"dataset": iter([1])}, "train.task.dataset"),
        (custom, {"eval_dataset": DataLoader(Stream())}, "train.task.eval_dataset"),
        (custom, {"loss_function": None}, "train.task.loss_function"),
        (custom, {"build_model": nn.Linear(1, 1)}, "train.task.build_model"),
    ],
)
def test_a_wrong_type_is_refused(make: Any, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert caught.value.field == field


def test_the_message_names_field_value_and_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        train(steps="100")
    assert str(caught.value) == (
        "train.steps = '100': of type str, not a whole number. Use a whole number."
    )


def test_converters_may_be_a_list() -> None:
    converter = Float8()
    assert train(converters=[converter]).converters == (converter,)


def test_the_class_of_a_model_makes_models() -> None:
    assert custom(build_model=nn.Identity).build_model is nn.Identity
