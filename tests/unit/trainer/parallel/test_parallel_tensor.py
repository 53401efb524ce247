"""Which module gets which parallel style, and which has none. Needs no process group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from trainer.models.family import HUGGING_FACE
from trainer.models.hf import ModelConfig, build_on_meta
from trainer.parallel.tensor import (
    GatherSequence,
    tensor_styles,
    unsplit_modules,
)

COLWISE = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


def tiny(architecture: str = "llama", **settings: Any) -> nn.Module:
    given = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **settings,
    }
    return build_on_meta(ModelConfig(architecture=architecture, settings=given).resolve(64))


@functools.cache
def llama(tied: bool = False) -> nn.Module:
    return tiny(tie_word_embeddings=tied)


@functools.cache
def styles() -> dict[str, ParallelStyle]:
    return tensor_styles(llama())


def in_layers(*names: str) -> list[str]:
    return [f"model.layers.{index}.{name}" for index in (0, 1) for name in names]


def test_the_modules_with_a_style_are_these() -> None:
    layers = in_layers(*COLWISE, *ROWWISE, *NORMS, "self_attn", "mlp")
    others = ["model.layers.0", "model.embed_tokens", "model.norm", "lm_head"]
    assert sorted(styles()) == sorted(layers + others)


@pytest.mark.parametrize("name", in_layers(*COLWISE))
def test_a_column_wise_layer_takes_the_gathered_sequence(name: str) -> None:
    style = styles()[name]
    assert isinstance(style, ColwiseParallel)
    assert style.input_layouts == (Replicate(),)
    assert style.output_layouts == (Shard(-1),)


@pytest.mark.parametrize("name", in_layers("self_attn", "mlp"))
def test_a_block_with_column_wise_layers_gathers_the_sequence(name: str) -> None:
    assert isinstance(styles()[name], GatherSequence)


@pytest.mark.parametrize("name", in_layers(*ROWWISE))
def test_a_row_wise_layer_scatters_its_sums_over_the_sequence(name: str) -> None:
    style = styles()[name]
    assert isinstance(style, RowwiseParallel)
    assert style.input_layouts == (Shard(-1),)
    assert style.output_layouts == (Shard(1),)


@pytest.mark.parametrize("name", [*in_layers(*NORMS), "model.norm"])
def test_a_norm_works_on_its_part_of_the_sequence(name: str) -> None:
    style = styles()[name]
    assert isinstance(style, SequenceParallel)
    assert style.sequence_sharding == (Shard(1),)
    assert style.use_local_output


def test_the_head_gathers_the_sequence_and_gives_whole_logits() -> None:
    style = styles()["lm_head"]
    assert isinstance(style, ColwiseParallel)
    assert style.input_layouts == (Shard(1),)
    assert style.output_layouts == (Replicate(),)


def test_the_embedding_gives_the_whole_sequence() -> None:
    style = styles()["model.embed_tokens"]
    assert isinstance(style, RowwiseParallel)
    assert style.input_layouts == (Replicate(),)
    assert style.output_layouts == (Replicate(),)


def test_the_first_block_splits_the_sequence() -> None:
    style = styles()["model.layers.0"]
    assert isinstance(style, PrepareModuleInput)
    assert style.input_layouts == (Replicate(),)
    assert style.desired_input_layouts == (Shard(1),)
    assert style.use_local_output


def test_the_decoder_layers_are_the_longest_list() -> None:
    assert HUGGING_FACE.blocks(llama()) == ["model.layers.0", "model.layers.1"]
    model = nn.Module()
    model.short = nn.ModuleList([nn.Linear(1, 1)])
    model.body = nn.Module()
    model.body.blocks = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])
    assert HUGGING_FACE.blocks(model) == [f"body.blocks.{index}" for index in range(3)]


def test_a_model_without_a_list_has_no_decoder_layers() -> None:
    assert HUGGING_FACE.blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU())) == []


def test_an_embedding_and_a_head_of_their_own_are_units() -> None:
    assert HUGGING_FACE.ends(llama()) == ["model.embed_tokens", "lm_head"]
    assert HUGGING_FACE.ends(llama(tied=True)) == []
    assert HUGGING_FACE.ends(nn.Sequential(nn.Linear(1, 1))) == []


def test_tied_parameters_are_found() -> None:
    assert HUGGING_FACE.tied(llama()) == []
    assert HUGGING_FACE.tied(llama(tied=True)) == [("model.embed_tokens.weight", "lm_head.weight")]


def styled(model: Any) -> dict[str, ParallelStyle]:
    return tensor_styles(model)


def names_with(model: nn.Module, kind: type[ParallelStyle]) -> set[str]:
    return {name for name, style in styled(model).items() if isinstance(style, kind)}


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_that_the_plan_leaves_out_are_split_by_rows(tied: bool) -> None:
    model: Any = tiny("gpt_neox", tie_word_embeddings=tied)
    assert not [pattern for pattern in model.tp_plan if "embed" in pattern]
    style = styled(model)["gpt_neox.embed_in"]
    assert isinstance(style, RowwiseParallel)
    assert style.input_layouts == (Replicate(),)
    assert style.output_layouts == (Replicate(),)
    assert unsplit_modules(model) == []


def test_a_norm_is_known_by_its_place_whatever_its_name() -> None:
    """Nemotron's class ends in `Norm1P`, Phi's is called `final_layernorm`, HyperCLOVA X has two
    more in a block."""
    assert names_with(tiny("nemotron"), SequenceParallel) == {*in_layers(*NORMS), "model.norm"}
    phi = {*in_layers("input_layernorm"), "model.final_layernorm"}
    assert names_with(tiny("phi"), SequenceParallel) == phi
    post = tiny("hyperclovax", use_post_norm=True)
    inside = in_layers(*NORMS, "post_norm1", "post_norm2")
    assert names_with(post, SequenceParallel) == {*inside, "model.norm"}


@pytest.mark.parametrize("architecture", ["llama", "gemma", "olmo", "granite", "starcoder2", "phi"])
def test_nothing_is_left_over_in_a_model_that_can_be_split(architecture: str) -> None:
    model: Any = tiny(architecture)
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    divided = (ColwiseParallel, RowwiseParallel, SequenceParallel)
    assert owners <= {name for kind in divided for name in names_with(model, kind)}
    assert unsplit_modules(model) == []


def changed(change: Callable[[Any], object]) -> list[str]:
    """What is left over in a Llama after `change`."""
    model: Any = tiny()
    change(model)
    return unsplit_modules(model)


@pytest.mark.parametrize(
    ("change", "left_over"),
    [
        (
            lambda m: m.model.layers[1].self_attn.register_module("q_norm", nn.LayerNorm(4)),
            ["model.layers.1.self_attn.q_norm"],
        ),
        (
            lambda m: m.model.layers[0].self_attn.register_module(
                "k_norm", nn.LayerNorm(4, elementwise_affine=False)
            ),
            ["model.layers.0.self_attn.k_norm"],
        ),
        (
            lambda m: m.model.register_module("embed_norm", nn.LayerNorm(16)),
            ["model.norm", "model.embed_norm"],
        ),
        (lambda m: m.register_module("norm", nn.LayerNorm(16)), ["norm"]),
        (
            lambda m: m.model.layers[0].mlp.register_module("gate", nn.Linear(16, 1)),
            ["model.layers.0.mlp.gate"],
        ),
        # A module whose inputs are moved is not therefore divided.
        (
            lambda m: m.model.layers[1].self_attn.register_parameter("sinks", scale()),
            ["model.layers.1.self_attn"],
        ),
        (
            lambda m: m.model.layers[0].register_parameter("scale", scale()),
            ["model.layers.0"],
        ),
        (lambda m: m.model.register_parameter("scale", scale()), ["model"]),
    ],
)
def test_what_has_no_known_place_is_named(
    change: Callable[[Any], object], left_over: list[str]
) -> None:
    assert changed(change) == left_over


def scale() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, device="meta"))
