"""A model family added from outside the package."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from tests.support.tiny import tiny_train, write_text
from trainer.errors import ConfigError
from trainer.models import family as registry
from trainer.models.family import HUGGING_FACE, ModelFamily, family_of, register_family
from trainer.parallel.check import check_tensor_parallel
from trainer.parallel.tensor import tensor_styles


class UnsplitHead(ModelFamily):
    """Llama whose output layer every tensor rank holds whole."""

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        """See ModelFamily."""
        plan = super().tensor_plan(model)
        return {name: style for name, style in plan.items() if name != "lm_head"}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelFamily]:
    """Registered for Llama while a test runs."""
    monkeypatch.setattr(registry, "_FAMILIES", {})
    family = UnsplitHead(divided=("hidden_size",))
    register_family("llama", family)
    yield family


def test_a_family_of_ones_own_travels_with_the_task(
    ours: ModelFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = tiny_train(write_text(tmp_path / "text"))
    sent = pickle.dumps(train.task.prepare(train, str(tmp_path / "cache")))
    monkeypatch.setattr(registry, "_FAMILIES", {})  # as in a worker's process
    task = pickle.loads(sent)
    assert task.family == ours
    model, _ = task.build(0)
    assert "lm_head" in tensor_styles(model)
    assert "lm_head" not in tensor_styles(model, task.family)


def test_the_check_asks_the_family(ours: ModelFamily, tmp_path: Path) -> None:
    train = tiny_train(write_text(tmp_path / "text"))
    config = train.task.model.resolve(0)
    model = ours.build_on_meta(config)
    with pytest.raises(ConfigError, match="leaves out lm_head"):
        check_tensor_parallel(config, model, 2, 16)


def test_an_architecture_has_one_family(ours: ModelFamily) -> None:
    register_family("llama", UnsplitHead(divided=("hidden_size",)))
    with pytest.raises(ConfigError, match="registered"):
        register_family("llama", HUGGING_FACE)
    assert (family_of("llama"), family_of("qwen2")) == (ours, HUGGING_FACE)
