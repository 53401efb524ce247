"""What `Float8` converts, what it refuses, and what a dry run sees of it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from elastic import Float8, ParallelConfig, TrainConfig
from tests.support.small_llama import small_train
from trainer.dryrun.rank import Collective, dry_run
from trainer.dryrun.shape import prepare_shape
from trainer.engine.build import build_model
from trainer.engine.state import state_table
from trainer.errors import ConfigError
from trainer.float8.linear import Float8Linear
from trainer.models.init import FullWeights


def with_float8(*, shard: int = 1, tensor: int = 1, **options: Any) -> TrainConfig:
    converters = (Float8(**options),)
    return small_train(shard=shard, tensor=tensor, converters=converters, precision="bfloat16")


def converted(train: TrainConfig) -> nn.Module:
    return build_model(prepare_shape(train), train)[0]


def float8_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def test_the_blocks_linear_layers_are_converted_and_the_head_is_not() -> None:
    names = float8_layers(converted(with_float8()))
    assert len(names) == 4 * 7 and "lm_head" not in names
    kept = float8_layers(converted(with_float8(keep=("*.q_proj", "model.layers.0.*"))))
    assert len(kept) == 3 * 6


@pytest.mark.parametrize("gather", [False, True])
def test_the_state_is_that_of_the_plain_model(gather: bool) -> None:
    plain = small_train(precision="bfloat16")
    tables = [state_table(converted(t), t.optimizer) for t in (plain, with_float8(gather=gather))]
    assert tables[0] == tables[1]


def test_layers_with_odd_sides_stay_and_a_model_of_them_alone_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 10))
    assert float8_layers(Float8().convert(model, FullWeights({}))[0]) == ["0"]
    with pytest.raises(ConfigError, match="no linear layer beside the head"):
        Float8().convert(nn.Sequential(nn.Linear(3, 3)), FullWeights({}))


class Tied(nn.Module):
    """A custom model whose head has the table's weight, and two of whose layers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.first = self.again = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("gather", [False, True])
def test_what_is_tied_stays_tied(gather: bool) -> None:
    plain: Any = Tied()
    names = list(plain.state_dict())
    model: Any = Float8(gather=gather).convert(plain, FullWeights({}))[0]
    assert model.head.weight is model.table.weight
    assert model.first is model.again
    assert float8_layers(model) == ["first"]
    assert list(model.state_dict()) == names


def test_a_layer_that_is_kept_is_kept_under_all_its_names() -> None:
    model: Any = nn.ModuleDict({"tied": Tied(), "more": nn.Linear(16, 16)})
    Float8(keep=("tied.again",)).convert(model, FullWeights({}))
    assert float8_layers(model) == ["more"]


def test_a_pattern_that_keeps_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as error:
        converted(with_float8(keep=("lm_head", "model.layers.0.self_attn.q_prj")))
    assert str(error.value).startswith("Float8.keep = 'model.layers.0.self_attn.q_prj': ")
    assert "such as 'model.layers.0.self_attn.q_proj'" in str(error.value)
    with pytest.raises(ConfigError, match="no linear layer's name is this, or fits"):
        converted(with_float8(keep=("*.norm",)))


def test_delayed_scaling_is_refused_with_the_reason() -> None:
    wrong: Any = "delayed"
    with pytest.raises(ConfigError, match="depends on the lanes that a replica was dealt"):
        Float8(recipe=wrong)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (
            with_float8(shard=3, gather=True),
            "256 rows, which 1 tensor ranks x 3 shards do not divide",
        ),
        (with_float8(tensor=16), "over 16 tensor ranks the sides"),
        (
            replace(
                with_float8(gather=True),
                parallel=ParallelConfig(shard=4, reshard_after_forward=2),
            ),
            r"train\.parallel\.reshard_after_forward = 2: .* over 2 of 4 workers",
        ),
    ],
)
def test_layouts_that_cannot_have_it_are_refused(train: TrainConfig, said: str) -> None:
    model = converted(small_train(converters=train.converters, precision="bfloat16"))
    with pytest.raises(ConfigError, match=said):
        train.converters[0].check(model, train, None)  # type: ignore[attr-defined]


def test_rows_are_not_gathered_in_8_bits_nor_computed_in_float32() -> None:
    with pytest.raises(ConfigError, match="8 bits hold one of them"):
        Float8(recipe="rowwise", gather=True)
    with pytest.raises(ConfigError, match="Use precision='bfloat16'"):
        converted(small_train(converters=(Float8(recipe="rowwise"),)))


def test_a_converter_travels() -> None:
    assert pickle.loads(pickle.dumps(Float8(gather=True))) == Float8(gather=True)


BLOCKS, BLOCK = 4, 256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 512
"""Of the model, and the numbers of a block's seven weights."""


def collectives(*converters: Float8, **layout: Any) -> dict[str, Collective]:
    """Of a dry run, by group and kind."""
    parallel = ParallelConfig(**layout)
    train = replace(small_train(precision="bfloat16", converters=converters), parallel=parallel)
    found = dry_run(train, replicas=1, device="cuda").collectives
    return {f"{c.group} {c.kind}": c for c in found}


@pytest.mark.parametrize(("keep", "weights"), [((), 7), (("*.q_proj", "*.down_proj"), 5)])
def test_a_dry_run_sees_half_the_bytes_gathered(keep: tuple[str, ...], weights: int) -> None:
    """Of the weights that are gathered in 8 bits; the rest is bfloat16 as before. Those of a block
    take one more gather, of their maxima, in forward and in backward."""
    plain = collectives(shard=2)
    found = collectives(Float8(gather=True, keep=keep), shard=2)
    assert set(found) == set(plain)
    before, after = plain["shard all_gather"], found["shard all_gather"]
    times = 2 * before.count // (2 * BLOCKS + 1 + 1 + 1)  # table, head and norm once
    assert after.count - before.count == BLOCKS * times
    numbers = BLOCK - (256 * 256 + 256 * 512 if keep else 0)
    maxima = 4 * weights * 2  # of both workers
    assert before.bytes - after.bytes == BLOCKS * times * (numbers - maxima)


def test_maxima_go_in_two_levels_where_weights_do() -> None:
    plain = collectives(shard=4, workers_per_node=2)
    found = collectives(Float8(gather=True), shard=4, workers_per_node=2)
    assert set(found) == set(plain) and "shard all_gather" not in found
    assert found["nodes send"].count > plain["nodes send"].count
