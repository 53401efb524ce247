"""What the soak asks of the trainer is accepted, and nothing is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks._chaos import Schedule, draw_schedule, parse_layouts
from benchmarks._chaos_trainer import make_trainer, make_undisturbed
from tests.support.tiny import tiny_task
from trainer.config import TrainConfig
from trainer.engine.build import build_model
from trainer.tasks.causal_lm import PreparedCausalLM

LEAST = 8
"""Of the seeds that draw a pair."""


@pytest.fixture(scope="module")
def schedules() -> list[Schedule]:
    return [draw_schedule(seed, resize=True) for seed in range(2000)]


def test_every_run_is_accepted(schedules: list[Schedule], tmp_path: Path) -> None:
    """By what the driver checks before anything starts, in larger layouts, too. The model is built
    once for each of the values that its checks look at: that takes longest."""
    built = set[object]()
    larger = parse_layouts("2x4x2,1x8x1,2x4x1x2,2x3x1")
    asked = [draw_schedule(seed, larger, resize=True) for seed in range(50)]
    for schedule in [*asked, *schedules]:
        kind = replace(schedule.layout, replicas=1), schedule.features
        for train in (
            make_trainer(schedule, tmp_path, tmp_path).train,
            make_undisturbed(tmp_path, *kind),
        ):
            dims = train.parallel.dims
            degrees = dims.fsdp, dims.tensor, dims.regathers_partly
            new = {
                (train.converters, train.precision, degrees),
                (train.offload, train.parallel.context),
            } - built
            if new:
                built |= new
                check_model(train)


def check_model(train: TrainConfig) -> None:
    train = replace(train, task=getattr(train.task, "task", train.task))
    build_model(PreparedCausalLM.without_text(train, 300), train)


def words(schedule: Schedule) -> set[str]:
    """What is drawn of a run, in words of which two may be drawn together."""
    layout, asked = schedule.layout, schedule.features
    assert asked is not None
    reshard = asked.reshard_after_forward
    found = {
        "shard": layout.shard > 1,
        "tensor": layout.tensor > 1,
        "context": layout.context > 1,
        str(asked.strategy): asked.strategy is not None,
        "kept": reshard is False,
        "let go": reshard is True,
        "between": isinstance(reshard, int) and not isinstance(reshard, bool),
        "two levels": asked.workers_per_node is not None,
        f"recompute {asked.recompute}": asked.recompute is not None,
        "offload": asked.horizon is not None,
        "apart": asked.texts == "apart",
        "bfloat16": asked.precision == "bfloat16",
        str(asked.recipe): asked.recipe is not None,
        "gather": asked.gather,
        "moments": asked.moment_dtype == "bfloat16",
        "masters": asked.master_dtype == "bfloat16",
        "reduce": asked.reduce_dtype == "bfloat16",
        "lane buffers": asked.lane_buffers is not None,
        "prefetch": asked.prefetch > 0,
        "ahead": asked.gather_ahead > 1,
        "chunks": asked.loss_chunk is not None,
        "library": asked.library is not None,
        "profile": asked.profile is not None,
        "buckets": asked.bucket_bytes is not None,
        "micro batches": asked.micro_batch is not None,
        "compared": asked.compare_every == 5,
        "witnesses": asked.witness_every == 4,
        "blocks": asked.hidden_size > 64,
        "slow heals": asked.heal_bytes_per_s is not None,
    }
    return {word for word, drawn in found.items() if drawn}


STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
OF_SHARDS = ("shard", "context", "kept", "let go", "between", "two levels", "gather", "ahead")
NEVER = {
    *combinations(STRATEGIES, 2),
    *(("NO_SHARD", word) for word in OF_SHARDS),
    *combinations(("kept", "let go", "between"), 2),
    *((strategy, "kept") for strategy in STRATEGIES[2:]),
    ("SHARD_GRAD_OP", "let go"),
    ("SHARD_GRAD_OP", "between"),
    ("tensor", "between"),
    ("tensor", "two levels"),
    ("between", "two levels"),
    ("between", "gather"),
    *combinations(("recompute full", "recompute selective", "recompute 2"), 2),
    *combinations(("tensorwise", "rowwise", "library"), 2),
    ("rowwise", "gather"),
    ("library", "gather"),
    *((word, "micro batches") for word in ("shard", "two levels")),
}
"""What the product refuses together, or what would say the same twice or nothing; and tensor groups
in two levels, which need eight workers, more than are drawn."""


def test_every_pair_of_features_is_drawn(schedules: list[Schedule]) -> None:
    drawn = [words(schedule) for schedule in schedules]
    counts = Counter(frozenset(pair) for found in drawn for pair in combinations(found, 2))
    never = set(map(frozenset, NEVER))
    known = sorted(set().union(*drawn))
    assert len(known) == 35
    wrong = {
        pair: counts[frozenset(pair)]
        for pair in combinations(known, 2)
        if (counts[frozenset(pair)] < LEAST) != (frozenset(pair) in never)
    }
    assert wrong == {}


def test_tensor_groups_in_two_levels_are_drawn_where_a_layout_is_asked_for() -> None:
    asked = [draw_schedule(seed, parse_layouts("1x4x2"), resize=True) for seed in range(50)]
    assert sum({"tensor", "two levels"} <= words(schedule) for schedule in asked) >= LEAST


def test_replicas_over_two_hosts_are_drawn(schedules: list[Schedule]) -> None:
    assert sum(schedule.hosts and schedule.nodes == 2 for schedule in schedules) >= LEAST


def test_a_plain_run_asks_for_nothing(tmp_path: Path) -> None:
    plain = draw_schedule(46, resize=True, plain=True)
    train = make_undisturbed(tmp_path, plain.layout, plain.features)
    assert train.task == tiny_task(tmp_path)
    assert (train.converters, train.precision, train.offload) == ((), "float32", None)
