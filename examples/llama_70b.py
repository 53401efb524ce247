"""Llama 3 70B on 1,024 GPUs: layouts to try with `elastic dryrun`, and to start from.

elastic dryrun examples/llama_70b.py:on_p4d --instance p4d --nodes 128
elastic dryrun examples/llama_70b.py:hybrid_on_p4d --instance p4d --nodes 128
elastic dryrun examples/llama_70b.py:on_p5 --instance p5 --nodes 16
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

MODEL = ModelConfig(
    architecture="llama",
    settings={
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
)
"""Llama 3 70B."""


def trainer(
    replicas: int, *, shard: int, tensor: int = 8, seq_len: int, global_batch: int = 512
) -> ElasticTrainer:
    """A run.

    Args:
        replicas: at most.
        shard: workers that share one copy of the state, times those that share each layer.
        tensor: workers that share each layer.
        seq_len: tokens in a sequence.
        global_batch: sequences in a step.
    """
    return ElasticTrainer(
        TrainConfig(
            task=CausalLM(
                model=MODEL,
                data=DataConfig(paths=("/data/text",), tokenizer="/data/tokenizer.json"),
                seq_len=seq_len,
                loss_chunk=1024,
            ),
            steps=100_000,
            global_batch=global_batch,
            micro_batch=1,
            parallel=ParallelConfig(strategy="HYBRID_SHARD", shard=shard, tensor=tensor),
            precision="bfloat16",
            recompute="full",
        ),
        scaling=ScalingConfig(max_replicas=replicas, min_replicas=1, device="cuda"),
    )


on_p4d = trainer(8, shard=16, seq_len=4096)
"""128 machines: eight replicas of sixteen."""

hybrid_on_p4d = trainer(8, shard=64, tensor=2, seq_len=4096, global_batch=1024)
"""The same machines, with a tensor group of two: eight replicas, each sharded over 64 pairs."""

on_p5 = trainer(2, shard=8, seq_len=8192)
"""16 machines: two replicas of eight."""
