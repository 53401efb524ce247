"""The trainer's features as a matrix: their values, which of them do not go together, and the run
that a case of it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.covering import Case, cover
from tests.support.te_stand_in import OnCpu
from tests.support.tiny import tiny_task, tiny_train
from trainer.config import OffloadConfig, OptimizerConfig, ParallelConfig, TrainConfig
from trainer.float8.config import Float8

LANES = 2

_SHARDS: Mapping[str, tuple[int, int, int]] = {
    "NO_SHARD": (1, 0, 0),
    "SHARD_GRAD_OP": (2, 1, 1),
    "FULL_SHARD": (2, 2, 1),
    "FULL_SHARD to 2": (4, 2, 1),
    "two levels": (4, 2, 2),
    "HYBRID_SHARD": (2, 1, 1),
    "three shards": (3, 3, 1),
}
"""The shard degree by the strategy, at context 1, 2 and 4; 0: there is none."""

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "strategy": dict.fromkeys(_SHARDS),
    "tensor": {"1": 1, "2": 2},
    "context": {"1": 1, "2": 2, "4": 4},
    "recompute": {"none": None, "full": "full", "selective": "selective", "every second": 2},
    "offload": {
        "none": None,
        "horizon 1": OffloadConfig(horizon=1, least_bytes=1),
        "horizon 2": OffloadConfig(horizon=2, least_bytes=1),
    },
    "texts": {"joined": "joined", "apart": "apart"},
    "precision": {
        "float32": {},
        "bfloat16": {"precision": "bfloat16"},
        "8 bits by tensor": {"converters": (Float8(),)},
        "8 bits gathered": {"converters": (Float8(gather=True),), "precision": "bfloat16"},
        "8 bits by row": {"converters": (Float8(recipe="rowwise"),), "precision": "bfloat16"},
        "library": {"converters": (OnCpu(),), "precision": "bfloat16"},
        "library in 8 bits": {"converters": (OnCpu(float8="current"),), "precision": "bfloat16"},
    },
    "state": {"float32": "float32", "bfloat16": "bfloat16"},
    "head": {"whole": None, "in chunks": 3},
    "gather ahead": {"1": 1, "2": 2},
}
"""Feature -> name of a value -> what it is in the settings."""

REFUSED: tuple[tuple[Case, str], ...] = (
    ({"strategy": "NO_SHARD", "context": "2"}, "Use shard = 1 and context = 1"),
    ({"strategy": "NO_SHARD", "context": "4"}, "Use shard = 1 and context = 1"),
    ({"strategy": "FULL_SHARD to 2", "tensor": "2"}, "beside tensor parallelism"),
    ({"strategy": "FULL_SHARD to 2", "precision": "8 bits gathered"}, "gather=False"),
    ({"strategy": "three shards", "precision": "8 bits gathered"}, "FSDP2 pads no shard"),
)
"""What the product refuses, and how."""

MOST_WORKERS = 8
"""Larger layouts are left out: these tests run on two cores."""

_MODEL = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128}
"""More blocks than the longest horizon. 16 divides the sides of each part of a layer."""


def cases(
    strength: int, *, only: Mapping[str, Sequence[str]] | None = None, replicas: int | None = None
) -> list[Case]:
    """Cases in which every so many values meet, of those that do not cost too much.

    Args:
        strength: 1: every value; 2: every pair.
        only: names of the values that some features are to have; of others all.
        replicas: that all are to have; None: those of their strategies.
    """
    names = {feature: tuple(values) for feature, values in FEATURES.items()} | dict(only or {})

    def workers(case: Case) -> int:
        parallel, usual = layout_of(case)
        return (replicas or usual) * parallel.workers

    def allowed(case: Case) -> bool:
        if any(refused.items() <= case.items() for refused, _ in REFUSED):
            return False
        is_laid_out = {"strategy", "tensor", "context"} <= case.keys()
        return not is_laid_out or workers(case) <= MOST_WORKERS

    return cover(names, strength, allowed=allowed, cost=workers)


def layout_of(case: Case) -> tuple[ParallelConfig, int]:
    """How one replica of a case is split, and how many there are."""
    strategy: Any = case["strategy"]
    context, tensor = FEATURES["context"][case["context"]], FEATURES["tensor"][case["tensor"]]
    degrees = {
        "shard": _SHARDS[strategy][context // 2] or 1,
        "context": context,
        "tensor": tensor,
    }
    if strategy == "FULL_SHARD to 2":
        return ParallelConfig(**degrees, reshard_after_forward=2), 1
    if strategy == "two levels":
        half = degrees["shard"] * context * tensor // 2
        return ParallelConfig(**degrees, workers_per_node=half), 1
    if strategy == "three shards":  # which divide no weight's rows
        return ParallelConfig(**degrees), 1
    replicas = 2 if strategy in ("NO_SHARD", "HYBRID_SHARD") else 1
    return ParallelConfig(**degrees, strategy=strategy), replicas


def train_of(case: Case, text: Path, **changes: Any) -> TrainConfig:
    """The settings of a run of a case, on short texts, of which several lie in a sample."""
    value = {feature: FEATURES[feature][name] for feature, name in case.items()}
    parallel, _ = layout_of(case)
    task = replace(tiny_task(text, **_MODEL), texts=value["texts"], loss_chunk=value["head"])
    optimizer = OptimizerConfig(
        lr=1e-2,
        clip_norm=0.0,
        moment_dtype=value["state"],
        master_dtype=value["state"],
    )
    settings: dict[str, Any] = {
        "task": task,
        "global_batch": 24,
        "lanes": LANES,
        "micro_batch": 6 // parallel.shard,  # two in a lane; of four shards three
        "eval_samples": 8,
        "parallel": parallel,
        "recompute": value["recompute"],
        "offload": value["offload"],
        "gather_ahead": value["gather ahead"],
        "optimizer": optimizer,
        **value["precision"],
    }
    return tiny_train(text, **{**settings, **changes})


def bare(train: TrainConfig) -> TrainConfig:
    """The settings without all that is promised to change no bit."""
    converters = tuple(
        replace(converter, gather=False) if isinstance(converter, Float8) else converter
        for converter in train.converters
    )
    return replace(
        train,
        parallel=replace(train.parallel, strategy=None, reshard_after_forward=None),
        converters=converters,
        recompute=None,
        offload=None,
        gather_ahead=1,
    )
