"""Which models' attention may be a ring's."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.errors import ConfigError
from trainer.models.hf import ModelConfig
from trainer.parallel.context.trial import check_ring

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}


def config(architecture: str, **settings: Any) -> dict[str, Any]:
    return ModelConfig(architecture=architecture, settings=settings).resolve(64)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox"])
def test_a_decoder_of_plain_attention_may(architecture: str) -> None:
    check_ring(config(architecture), 2)


@pytest.mark.parametrize(
    ("architecture", "settings", "fact"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window"),
        ("gemma2", {}, "layers of sliding_attention"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("mixtral", {"router_aux_loss_coef": 0.1}, "router"),
        ("llama", {"head_dim": 8, "rope_parameters": LONGROPE}, "largest position"),
        ("bloom", {}, "cannot build"),  # positions by a bias of its own
    ],
)
def test_another_is_refused(architecture: str, settings: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        check_ring(config(architecture, **settings), 2)


def test_the_trial_sees_what_ignores_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.parallel.context.attention.put_ring_in", lambda model, ring: None)
    with pytest.raises(ConfigError, match="others than those of their own text"):
        check_ring(config("llama"), 2)
