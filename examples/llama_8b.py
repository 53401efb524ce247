"""Llama 3 8B on one GPU of 141 GB, with all of its state in float32 or in bfloat16: to try with
`elastic dryrun`, and to start from.

elastic dryrun examples/llama_8b.py:in_float32 --instance p5e
elastic dryrun examples/llama_8b.py:in_bfloat16 --instance p5e
"""

from __future__ import annotations

from typing import Literal

from elastic import (
    CausalLM,
    DataConfig,
    ElasticTrainer,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
)

MODEL = ModelConfig(
    architecture="llama",
    settings={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
)
"""Llama 3 8B."""


def trainer(state: Literal["float32", "bfloat16"]) -> ElasticTrainer:
    """A run with eight sequences of 8,192 tokens in a step.

    Args:
        state: number format of parameters and moments.
    """
    return ElasticTrainer(
        TrainConfig(
            task=CausalLM(
                model=MODEL,
                data=DataConfig(paths=("/data/text",), tokenizer="/data/tokenizer.json"),
                seq_len=8192,
                loss_chunk=1024,
            ),
            steps=100_000,
            global_batch=8,
            micro_batch=1,
            precision="bfloat16",
            recompute="full",
            optimizer=OptimizerConfig(master_dtype=state, moment_dtype=state),
        ),
        scaling=ScalingConfig(max_replicas=1, device="cuda"),
    )


in_float32 = trainer("float32")
"""16 bytes for each parameter, gradients among them."""

in_bfloat16 = trainer("bfloat16")
"""10 bytes."""
