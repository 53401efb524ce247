"""A Llama of some millions of numbers, for measures of memory: it has no text, only the form of
it."""

from __future__ import annotations

from typing import Any

from elastic import CausalLM, DataConfig, ModelConfig, ParallelConfig, TrainConfig

SETTINGS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}


def small_train(
    *,
    shard: int = 1,
    tensor: int = 1,
    tied: bool = False,
    loss_chunk: int | None = None,
    **changes: Any,
) -> TrainConfig:
    """Settings of a run that is never made; `changes` are of the TrainConfig."""
    settings: dict[str, Any] = {
        "task": CausalLM(
            model=ModelConfig(settings={**SETTINGS, "tie_word_embeddings": tied}),
            data=DataConfig(paths=("no text",), vocab_size=300),
            seq_len=128,
            loss_chunk=loss_chunk,
        ),
        "steps": 10,
        "global_batch": 4,
        "lanes": 1,
        "parallel": ParallelConfig(shard=shard, tensor=tensor),
    }
    return TrainConfig(**{**settings, **changes})
