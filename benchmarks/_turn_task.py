"""What the systems that take turns train: a small Llama on words drawn at random."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from elastic import CausalLM, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig

HEADS = 8


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes that `make_task` goes by."""
    add = parser.add_argument
    add("--hidden", type=int, default=256, help="hidden size of the model (default 256)")
    add("--layers", type=int, default=4, help="its layers (default 4)")
    add("--seq-len", type=int, default=128, help="tokens in a sample (default 128)")


def make_task(
    directory: Path, options: argparse.Namespace, *, global_batch: int, replicas: int, shard: int
) -> tuple[Any, TrainConfig]:
    """The prepared task and the settings, for all systems, which train until they are ended. None
    of them promises bits: the plain loops do not."""
    words = np.random.default_rng(7).integers(0, 1000, 60_000)
    (directory / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    settings = {
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": 1024,
        "max_position_embeddings": options.seq_len,
    }
    task = CausalLM(
        model=ModelConfig(settings=settings),
        data=DataConfig(paths=(str(directory / "text.txt"),), vocab_size=1024, holdout=0.0),
        seq_len=options.seq_len,
    )
    train = TrainConfig(
        task=task,
        steps=1_000_000,
        global_batch=global_batch,
        lanes=replicas,
        parallel=ParallelConfig(shard=shard),
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=2, clip_norm=1.0),
        determinism="fast",
    )
    return task.prepare(train, str(directory)), train
