"""A model that sees the tokens it is to predict is refused; what is causal is not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from trainer.errors import ConfigError
from trainer.models.causal import check_causal
from trainer.models.hf import ModelConfig

SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}


def check(architecture: str, settings: dict[str, Any] = SMALL, seq_len: int = 16) -> None:
    check_causal(ModelConfig(architecture=architecture, settings=settings).resolve(300), seq_len)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra"])
def test_an_encoder_is_refused(architecture: str) -> None:
    with pytest.raises(ConfigError, match="a later token changes what is said of an earlier") as it:
        check(architecture)
    assert (it.value.field, it.value.value) == ("train.task.model.architecture", architecture)
    assert "is_decoder" in it.value.fix


@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra"])
def test_an_encoder_that_is_told_to_be_a_decoder_is_taken(architecture: str) -> None:
    check(architecture, {**SMALL, "is_decoder": True})


def test_attention_in_both_directions_is_refused_in_a_decoder_too() -> None:
    with pytest.raises(ConfigError, match="a later token"):
        check("gemma3_text", {**SMALL, "use_bidirectional_attention": True})


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", SMALL),
        ("gpt2", {}),
        ("gpt_neox", SMALL),  # says is_decoder=False
        ("opt", SMALL),
        ("falcon", SMALL),
        ("gemma3_text", SMALL),  # layers of two types
        ("mixtral", SMALL),
        ("qwen2_moe", SMALL),
        ("deepseek_v3", SMALL),
        ("llama", {}),  # of the size that a user would train
    ],
)
def test_a_decoder_is_taken(
    architecture: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        check(architecture, settings)
    assert "could not be tried" not in caplog.text


def test_the_trial_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    check("llama")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_single_token_has_none_after_it() -> None:
    check("bert", seq_len=1)


def test_what_cannot_be_made_small_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {**ModelConfig(settings=SMALL).resolve(300), "num_layers": None, "hidden_act": "none"}
    check_causal(config, 16)
    assert "llama could not be tried" in caplog.text
