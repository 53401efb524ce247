"""Llama 2 13B with activations that wait in the machines' own memory: a layout to try with
`elastic dryrun`, and to start from.

elastic dryrun examples/llama_13b.py:on_p4d --instance p4d --nodes 16
"""

from __future__ import annotations

from elastic import (
    CausalLM,
    DataConfig,
    ElasticTrainer,
    ModelConfig,
    OffloadConfig,
    ParallelConfig,
    ScalingConfig,
    TrainConfig,
)

on_p4d = ElasticTrainer(
    TrainConfig(
        task=CausalLM(
            model=ModelConfig(
                architecture="llama",
                settings={
                    "hidden_size": 5120,
                    "intermediate_size": 13824,
                    "num_hidden_layers": 40,
                    "num_attention_heads": 40,
                    "num_key_value_heads": 40,
                    "vocab_size": 32000,
                    "max_position_embeddings": 4096,
                },
            ),
            data=DataConfig(paths=("/data/text",), tokenizer="/data/tokenizer.json"),
            seq_len=4096,
            loss_chunk=1024,
        ),
        steps=100_000,
        global_batch=1024,
        micro_batch=8,
        parallel=ParallelConfig(shard=16),
        precision="bfloat16",
        recompute="full",
        offload=OffloadConfig(horizon=2),
    ),
    scaling=ScalingConfig(max_replicas=8, min_replicas=1, device="cuda"),
)
"""16 machines: eight replicas of two."""
