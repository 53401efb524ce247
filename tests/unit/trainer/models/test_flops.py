"""Operations for one token, held against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.data.config import DataConfig
from trainer.errors import ConfigError
from trainer.models.flops import count_parameters, flops_of_transformer
from trainer.models.hf import ModelConfig, build_on_meta
from trainer.peaks import PEAKS, peak_flops
from trainer.tasks.causal_lm import CausalLM, PreparedCausalLM
from trainer.tasks.custom import CustomTask

LAYERS, HIDDEN, HEADS, HEAD, KEYS, INNER, VOCABULARY, SEQ_LEN = 3, 64, 4, 16, 2, 96, 320, 48
SETTINGS = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQ_LEN,
}
ATTENTION = 2 * HIDDEN * HEADS * HEAD + 2 * HIDDEN * KEYS * HEAD
NORMS = (2 * LAYERS + 1) * HIDDEN
HEAD_OF_MODEL = HIDDEN * VOCABULARY


def flops(architecture: str, **changes: Any) -> dict[str, float]:
    config = ModelConfig(architecture=architecture, settings={**SETTINGS, **changes}).resolve(0)
    return flops_of_transformer(build_on_meta(config), config, SEQ_LEN)


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_counts_its_head_and_not_its_table(tied: bool) -> None:
    found = flops("llama", tie_word_embeddings=tied)
    six_n = 6 * (LAYERS * (ATTENTION + 3 * HIDDEN * INNER) + NORMS + HEAD_OF_MODEL)
    pairs = 12 * LAYERS * HEADS * HEAD * SEQ_LEN
    assert found == {"6N": six_n, "attention": six_n + pairs, "causal": six_n + pairs / 2}


def test_heads_of_their_own_size_count_with_it() -> None:
    found = flops("llama", head_dim=2 * HEAD)
    assert found["attention"] - found["6N"] == 12 * LAYERS * HEADS * 2 * HEAD * SEQ_LEN


def test_of_experts_the_active_ones_count() -> None:
    found = flops("mixtral", num_local_experts=8, num_experts_per_tok=2)
    layer = ATTENTION + 2 * 3 * HIDDEN * INNER + 8 * HIDDEN  # two experts, and the router
    assert found["6N"] == 6 * (LAYERS * layer + NORMS + HEAD_OF_MODEL)


@pytest.mark.parametrize("window", [1, 16, 47, SEQ_LEN, 2 * SEQ_LEN])
@pytest.mark.parametrize(
    ("architecture", "kinds", "windows"),
    [
        ("mistral", None, LAYERS),
        ("qwen3", ["sliding_attention", "full_attention", "sliding_attention"], 2),
    ],
)
def test_of_a_window_the_pairs_in_it_count(
    architecture: str, kinds: list[str] | None, windows: int, window: int
) -> None:
    """Held against the mask, of whose diagonal the closed forms lack a half of what they see."""
    changes = {} if kinds is None else {"layer_types": kinds, "use_sliding_window": True}
    found = flops(architecture, sliding_window=window, head_dim=HEAD, **changes)
    places = torch.arange(SEQ_LEN)
    back = places[:, None] - places
    near, full = (
        int(((back >= 0) & (back < far)).sum()) - min(far, SEQ_LEN) / 2 for far in (window, SEQ_LEN)
    )
    pairs = windows * near + (LAYERS - windows) * full
    causal = found["causal"] - found["6N"]
    assert causal == pytest.approx(12 * HEADS * HEAD * pairs / SEQ_LEN)
    assert found["attention"] - found["6N"] == 2 * causal


def test_where_the_pairs_are_not_known_6n_alone_is_told() -> None:
    """Of other kinds of layers, and of texts that are kept apart only the data say how many."""
    model = ModelConfig(architecture="llama", settings=SETTINGS)
    data = DataConfig(paths=("nowhere",))
    task = CausalLM(model=model, data=data, seq_len=SEQ_LEN, texts="apart")
    train = TrainConfig(task=task, steps=1, global_batch=1)
    prepared = PreparedCausalLM.without_text(train, VOCABULARY)
    found = prepared.flops_per_token(build_on_meta(prepared.config))
    assert found == {"6N": flops("llama")["6N"]}
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    assert set(flops("qwen3", layer_types=kinds)) == {"6N"}


def test_llama_3_8b_is_what_torchtitan_says() -> None:
    """8,030,261,248 parameters, 525,336,576 of them in the table; 57.9 GFLOP a token at 8192."""
    config = ModelConfig(
        settings={
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        }
    ).resolve(0)
    found = flops_of_transformer(build_on_meta(config), config, 8192)
    assert found["6N"] == 6 * (8_030_261_248 - 525_336_576)
    assert found["attention"] == found["6N"] + 12 * 32 * 32 * 128 * 8192


def test_a_frozen_parameter_has_no_gradient_to_compute() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    model[0].weight.requires_grad_(False)
    assert count_parameters(model) == 4 * 32 + 6 * 16


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(), len(batch)


def custom(flops_per_term: float | None) -> CustomTask:
    return CustomTask(
        build_model=lambda: nn.Linear(4, 2),
        loss_function=loss_of,
        dataset=[torch.ones(4)],
        flops_per_term=flops_per_term,
    )


def test_a_custom_task_has_6n_or_what_it_says() -> None:
    assert custom(None).flops_per_token(nn.Linear(4, 2)) == {"6N": 60}
    assert custom(1e9).flops_per_token(nn.Linear(4, 2)) == {"given": 1e9}
    for nothing in (0.0, math.nan):
        with pytest.raises(ConfigError, match="flops_per_term"):
            custom(nothing)


def test_a_gpu_that_is_not_known_whole_has_no_peak() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA B300 SXM6 AC", "bfloat16") == 2250e12
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16") is None
    assert peak_flops("NVIDIA GH200 480GB", "bfloat16") is None
    assert peak_flops("", "float32") is None
    assert all(set(peaks) == {"bfloat16", "tf32", "float32"} for peaks in PEAKS.values())
    assert all(
        peaks["tf32"] == pytest.approx(peaks["bfloat16"] / 2, 1e-3) for peaks in PEAKS.values()
    )
