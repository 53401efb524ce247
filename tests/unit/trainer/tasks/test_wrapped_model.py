"""What a language model's task puts into the model still works where a converter wraps that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from tests.support.tiny import tiny_task, tiny_train, write_text
from trainer.config import ParallelConfig
from trainer.engine.build import build_model
from trainer.errors import ConfigError
from trainer.models.init import WeightSource
from trainer.parallel.context.attention import put_ring_in
from trainer.parallel.context.ring import Ring
from trainer.tasks.causal_lm import PreparedCausalLM

OUTER = "wrapped."


class Wrapper(nn.Module):
    """Holds the model, and has a configuration of its own, as adapters do."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped, self.config = wrapped, {"rank": 8}

    def forward(self, **inputs: Any) -> Any:
        return self.wrapped(**inputs)


@dataclass(frozen=True)
class OldNames:
    """Reads the weights under the names that they had."""

    source: WeightSource

    def read(self, name: str, *box: tuple[int, ...]) -> torch.Tensor:
        return self.source.read(name.removeprefix(OUTER), *box)


@dataclass(frozen=True)
class Wrap:
    """The converter."""

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        return Wrapper(model), OldNames(source)


@dataclass(frozen=True)
class Adapt:
    """Gives each block a layer more."""

    def convert(self, model: Any, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        for block in model.model.layers:
            block.adapter = nn.Linear(2, 2, bias=False, device="meta")
        return model, source


@dataclass(frozen=True)
class PlainHead:
    """Puts a head of its own in the place of the model's."""

    def convert(self, model: Any, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
        model.lm_head = head.to("meta")
        return model, source


@pytest.mark.parametrize(
    ("task", "parallel"),
    [
        ({"loss_chunk": 7}, {}),
        ({"texts": "apart"}, {}),
        ({}, {"context": 2}),
        ({"texts": "apart", "loss_chunk": 7}, {"context": 2}),
    ],
    ids=str,
)
def test_a_wrapped_model_learns_the_same(
    tmp_path: Path, task: dict[str, Any], parallel: dict[str, Any]
) -> None:
    text = write_text(tmp_path / "text")
    train = tiny_train(
        text,
        task=replace(tiny_task(text), **task),
        steps=2,
        parallel=ParallelConfig(**parallel),
    )
    found = []
    for converters in ((), (Wrap(),)):
        changed = replace(train, converters=converters)
        prepared = changed.task.prepare(changed, str(tmp_path / "cache"))
        results = run_layout(prepared, changed, replicas=1, lanes=2)
        assert all(isinstance(result, WorkerResult) for result in results), results
        found.append(results)
    plain, wrapped = found
    assert wrapped[0].losses == pytest.approx(plain[0].losses, rel=1e-6)
    assert wrapped[0].norms == pytest.approx(plain[0].norms, rel=1e-5)
    expected = full_parameters(plain)
    for name, value in full_parameters(wrapped).items():
        wanted = expected[name.removeprefix(OUTER)]
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=2e-4)


def test_another_head_does_not_go_with_chunks(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    task = replace(tiny_task(text), loss_chunk=7)
    train = tiny_train(text, task=task, converters=(PlainHead(),))
    prepared = PreparedCausalLM.without_text(train, 300)
    model, _ = build_model(prepared, train)
    with pytest.raises(
        ConfigError, match=r"train\.converters = 'LlamaForCausalLM': .*another head"
    ):
        prepared.loss(model, torch.zeros(1, 17, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Wrapper(nn.Linear(2, 2))])
def test_without_attention_of_transformers_there_is_no_ring(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"train\.converters = .*no attention of transformers'"):
        put_ring_in(model, Ring())


@pytest.mark.parametrize(
    ("converter", "why"),
    [
        (Wrap(), r"transformers has no plan for it"),
        (Adapt(), r"its plan leaves out model\.layers\.0\.adapter, model\.layers\.1\.adapter"),
        (PlainHead(), None),
    ],
)
def test_tensor_ranks_share_what_the_plan_knows(
    tmp_path: Path, converter: Any, why: str | None
) -> None:
    parallel = ParallelConfig(tensor=2)
    train = tiny_train(write_text(tmp_path / "text"), parallel=parallel, converters=(converter,))
    prepared = PreparedCausalLM.without_text(train, 300)
    if why is None:
        build_model(prepared, train)
        return
    with pytest.raises(ConfigError, match=rf"^train\.converters = .*{why}.*parallel\.tensor = 1"):
        build_model(prepared, train)
    build_model(prepared, replace(train, parallel=ParallelConfig(tensor=1)))
