"""Llama 3 8B on p5 nodes, and on one GPU of 141 GB with all of its state in float32 or in bfloat16:
to try with `elastic dryrun`, and to start from.

elastic dryrun examples/llama_8b.py:on_p5 --instance p5 --nodes 5
elastic dryrun examples/llama_8b.py:in_float32 --instance p5e
elastic dryrun examples/llama_8b.py:in_bfloat16 --instance p5e

Run as a program, it trains on p5 nodes.
"""

from __future__ import annotations

from typing import Literal

from ray.train import RunConfig

from elastic import (
    CausalLM,
    CheckpointConfig,
    DataConfig,
    ElasticTrainer,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
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


TASK = CausalLM(
    model=MODEL,
    data=DataConfig(paths=("/data/text",), tokenizer="/data/tokenizer.json"),
    seq_len=8192,
    loss_chunk=1024,
)

on_p5 = ElasticTrainer(
    TrainConfig(
        task=TASK,
        steps=100_000,
        global_batch=128,
        micro_batch=1,
        parallel=ParallelConfig(shard=8),
        precision="bfloat16",
        recompute="selective",
    ),
    scaling=ScalingConfig(max_replicas=4, min_replicas=1, spares=8, device="cuda", wait_s=1800),
    checkpoint=CheckpointConfig(every_steps=500, memory_every=50),
    run_config=RunConfig(name="llama-8b", storage_path="/data/runs"),
)
"""Five machines: four replicas of eight, each on a machine of its own, and a machine of spares."""


def trainer(state: Literal["float32", "bfloat16"]) -> ElasticTrainer:
    """A run on one GPU, with eight sequences of 8,192 tokens in a step.

    Args:
        state: number format of parameters and moments.
    """
    return ElasticTrainer(
        TrainConfig(
            task=TASK,
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

if __name__ == "__main__":
    print(on_p5.fit().path)
