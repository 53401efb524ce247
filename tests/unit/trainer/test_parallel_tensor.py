"""Which module of a Llama gets which parallel style. Needs no process group."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from trainer.models.hf import ModelConfig, build_on_meta
from trainer.parallel.tensor import GatherSequence, _tied_names, decoder_layers, tensor_styles

COLWISE = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


@functools.cache
def llama(tied: bool = False) -> nn.Module:
    settings = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    return build_on_meta(ModelConfig(settings=settings).resolve(64))


@functools.cache
def styles() -> dict[str, ParallelStyle]:
    plan: Any = llama().tp_plan
    return tensor_styles(llama(), plan)


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
    assert style.use_local_output == (name == "model.norm")


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
    assert decoder_layers(llama()) == ["model.layers.0", "model.layers.1"]
    model = nn.Module()
    model.short = nn.ModuleList([nn.Linear(1, 1)])
    model.body = nn.Module()
    model.body.blocks = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])
    assert decoder_layers(model) == [f"body.blocks.{index}" for index in range(3)]


def test_a_model_without_a_list_has_no_decoder_layers() -> None:
    assert decoder_layers(nn.Sequential(nn.Linear(1, 1), nn.ReLU())) == []


def test_tied_parameters_are_found() -> None:
    assert _tied_names(llama()) == []
    assert _tied_names(llama(tied=True)) == [("model.embed_tokens.weight", "lm_head.weight")]
