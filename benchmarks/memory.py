"""What fault tolerance takes of a GPU, against plain FSDP2, by dry runs of one worker.

Plain FSDP2 has one gradient, however many micro-batches it adds up: that is a replica of one lane
without others. Beside it, for 1, 2, 4 and 8 lanes a replica in 1, 2 and 4 replicas: the flat
float32 gradients that are held; the buckets under way and what a fault may add, in gradients, too;
and the peak of a step, without and with that reserve, against the plain one's.

The model is a Llama of 0.44 billion parameters; its blocks are recomputed, its state is replicated.
Nothing is allocated: the tensors are fake. What plain FSDP2 takes has float32 parameters and
moments, whatever ours have.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from tests.support.small_llama import small_train
from trainer.config import OptimizerConfig, TrainConfig
from trainer.dryrun.rank import RankNeeds, dry_run

LANES, REPLICAS = (1, 2, 4, 8), (1, 2, 4)
SETTINGS = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Runs the benchmark; the last line on stdout is one JSON object."""
    options = parse()
    train = settings(options)
    plain = needs(replace(train, optimizer=OptimizerConfig()), 1, 1)
    gradient = 4 * plain.parameters
    rows = []
    for lanes in LANES:
        for replicas in REPLICAS:
            found = needs(train, lanes, replicas)
            rows.append(row(found, lanes, replicas, plain, gradient))
            print(
                "{lanes} lanes a replica, {replicas} replicas: {gradients:.2f} gradients, "
                "buckets {buckets:.2f}, reserve {reserve:.2f}, peak {peak:.3f}, with reserve "
                "{with_reserve:.3f}".format(**rows[-1]),
                file=sys.stderr,
            )
    outcome: dict[str, Any] = {
        "parameters": plain.parameters,
        "plain_bytes": plain.peak_bytes,
        "rows": [{k: round(v, 3) for k, v in row.items()} for row in rows],
    }
    print(json.dumps(outcome))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    for name in ("reduce-dtype", "moment-dtype", "master-dtype"):
        parser.add_argument(f"--{name}", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lane-buffers", type=int, help="gradients on the GPU at most")
    return parser.parse_args()


def settings(options: argparse.Namespace) -> TrainConfig:
    """Of each run, but for lanes and batch."""
    train = small_train(
        precision="bfloat16",
        recompute="full",
        micro_batch=1,
        loss_chunk=128,
        reduce_dtype=options.reduce_dtype,
        lane_buffers=options.lane_buffers,
        optimizer=OptimizerConfig(
            moment_dtype=options.moment_dtype, master_dtype=options.master_dtype
        ),
    )
    model = replace(train.task.model, settings=SETTINGS)
    return replace(train, task=replace(train.task, model=model))


def needs(train: TrainConfig, lanes: int, replicas: int) -> RankNeeds:
    """Of a worker on a GPU, with so many lanes a replica."""
    total = lanes * replicas
    return dry_run(
        replace(train, lanes=total, global_batch=2 * total), replicas=replicas, device="cuda"
    )


def row(
    found: RankNeeds, lanes: int, replicas: int, plain: RankNeeds, gradient: int
) -> dict[str, float]:
    """Numbers of one layout."""
    return {
        "lanes": lanes,
        "replicas": replicas,
        "gradients": found.components["gradients"] / gradient,
        "buckets": found.components["buckets"] / gradient,
        "reserve": found.fault_reserve_bytes / gradient,
        "peak": found.peak_bytes / plain.peak_bytes,
        "with_reserve": (found.peak_bytes + found.fault_reserve_bytes) / plain.peak_bytes,
    }


if __name__ == "__main__":
    main()
