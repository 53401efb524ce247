"""Llama 2 7B at 32,768 tokens by context parallelism: a layout to try with `elastic dryrun`, and to
start from.

elastic dryrun examples/llama_7b_32k.py:on_p4d --instance p4d --nodes 32
"""

from __future__ import annotations

from elastic import (
    CausalLM,
    DataConfig,
    ElasticTrainer,
    ModelConfig,
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
                    "hidden_size": 4096,
                    "intermediate_size": 11008,
                    "num_hidden_layers": 32,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 32,
                    "vocab_size": 32000,
                    "max_position_embeddings": 32768,
                },
            ),
            data=DataConfig(paths=("/data/text",), tokenizer="/data/tokenizer.json"),
            seq_len=32768,
            loss_chunk=1024,
            texts="apart",
        ),
        steps=100_000,
        global_batch=128,
        micro_batch=1,
        parallel=ParallelConfig(strategy="HYBRID_SHARD", shard=16, context=4),
        precision="bfloat16",
        recompute="full",
    ),
    scaling=ScalingConfig(max_replicas=4, min_replicas=1, device="cuda"),
)
"""32 machines: four replicas of eight. Four GPUs of a machine share each sequence."""
