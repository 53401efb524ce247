"""A model that sees the tokens it is to predict is refused; what is causal is not."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.models.causal import check_causal
from trainer.models.computes import check_computes
from trainer.models.family import ModelFamily, family_of
from trainer.models.hf import ModelConfig

SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
SHARED = {**SMALL, "num_key_value_heads": 3}


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
        check("gemma3_text", {**SHARED, "use_bidirectional_attention": True})


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", SMALL),
        ("gpt2", {}),
        ("gpt_neox", SMALL),  # says is_decoder=False
        ("opt", SMALL),
        ("falcon", SMALL),
        ("gemma3_text", SHARED),  # layers of two types
        ("mixtral", SHARED),
        ("qwen2_moe", SHARED),
        ("deepseek_v3", {**SMALL, "num_key_value_heads": 4}),  # which it does not use
        ("llama", {}),  # of the size that a user would train
    ],
)
def test_a_decoder_is_taken(
    architecture: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        check(architecture, settings)
    assert "could not be tried" not in caplog.text


@pytest.mark.parametrize(
    ("architecture", "heads", "shared"),
    [("llama", 4, 3), ("llama", 12, 5), ("mixtral", 6, 8), ("gemma3_text", 6, 4)],
)
def test_heads_that_cannot_be_shared_are_refused(
    architecture: str, heads: int, shared: int
) -> None:
    """At a size that is tried, and at one that is not."""
    for hidden in (12 * heads, 1200 * heads):
        settings = {
            **{"hidden_size": hidden, "num_hidden_layers": 3, "intermediate_size": 4 * hidden},
            **{"num_attention_heads": heads, "num_key_value_heads": shared},
        }
        with pytest.raises(ConfigError) as it:
            check(architecture, settings)
        assert it.value.field == "train.task.model.settings"
        said = str(it.value.value)
        assert f"num_attention_heads = {heads}, num_key_value_heads = {shared}" in said
        assert re.search(rf"computes: RuntimeError: .*\({heads}\) must match", it.value.fact)


def test_what_only_its_small_copies_cannot_compute_is_taken_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Layers that are small name blocks by number, which two blocks do not have."""
    check("gemma4_text", {})
    assert "gemma4_text could not be tried" in caplog.text
    assert "A small one raised ValueError: `per_layer_config` keys" in caplog.text


def test_what_fake_tensors_do_not_know_is_no_reason_to_refuse() -> None:
    """It waits for a number of its input; and a product in it takes no float32 there."""
    for architecture in ("blt", "granitemoehybrid"):
        config = ModelConfig(architecture=architecture).resolve(300)
        check_computes(family_of(config["model_type"]), config, 8)


def test_kernels_that_need_a_gpu_are_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes a package of kernels where it is installed, whatever the device."""

    def kernel(*_: Any) -> Any:
        raise RuntimeError("Expected x.is_cuda() to be true, but got false.")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", kernel)
    config = ModelConfig(settings=SHARED).resolve(300)
    check_computes(family_of("llama"), config, 8)


class OfOurOwn(ModelFamily):
    """Builds its models itself."""

    def build_on_meta(self, config: Mapping[str, Any]) -> nn.Module:
        return super().build_on_meta(config)


def test_what_another_family_computes_is_not_known_on_this_machine() -> None:
    """Its kernels may be for GPUs alone."""
    config = ModelConfig(settings={**SMALL, "num_key_value_heads": 4}).resolve(300)
    check_computes(OfOurOwn(), config, 8)
    with pytest.raises(ConfigError):
        check_computes(family_of("llama"), config, 8)


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
    check("blt", {})
    assert "blt could not be tried" in caplog.text
    assert "A small one has too many parameters" in caplog.text
