from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic import ModelConfig
from tests.support.small_llama import SETTINGS, small_train
from tests.support.tiny import tiny_task, tiny_train
from trainer.config import OffloadConfig, OptimizerConfig, ParallelConfig, TrainConfig
from trainer.dryrun.changes import plan_changes
from trainer.dryrun.judge import Judge
from trainer.dryrun.kernels import attention_backward_bytes
from trainer.dryrun.machines import CONTEXT_BYTES, MACHINES, Machine
from trainer.dryrun.rank import RankNeeds, dry_run
from trainer.dryrun.report import Report
from trainer.dryrun.reserve import spare_buffers
from trainer.errors import ConfigError
from trainer.parallel import lone
from trainer.replication.lane_sums import LaneSums
from trainer.replication.lanes import deal_lanes, lane_buffers, plan_lane_buffers
from trainer.replication.step_commit import LaneStats
from trainer.tasks.causal_lm import CausalLM
from trainer.tasks.custom import CustomTask

D, F, V, LAYERS = (
    int(SETTINGS[name])
    for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
)
BLOCK = D * D + 2 * (D * D // 2) + D * D + 3 * D * F + 2 * D
"""Numbers in a block: four attention matrices, two of them half as large, three of the MLP, two
norms."""
ROOT = 2 * V * D + D
"""Embeddings, head, last norm."""
PARAMETERS = LAYERS * BLOCK + ROOT


@pytest.fixture(scope="module")
def sharded() -> RankNeeds:
    """Shard 2 in two replicas of two lanes each, four micro-batches a lane."""
    train = small_train(shard=2, lanes=4, global_batch=32, micro_batch=1)
    return dry_run(train, replicas=2, device="cuda")


def test_state_is_a_share_of_the_model(sharded: RankNeeds) -> None:
    assert sharded.parameters == PARAMETERS
    share = PARAMETERS * 4 / 2
    parts = sharded.components
    assert parts["parameters"] == pytest.approx(share, rel=0.01)
    assert parts["optimizer"] == pytest.approx(2 * share, rel=0.01)
    # Two lanes in a tree: one whole, one open, whose place the reduced gradient takes.
    assert parts["gradients"] == pytest.approx(2 * share, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [{}, {"compile": "require"}, {"parallel": ParallelConfig(context=2)}],
    ids=["alone", "compiled", "context 2"],
)
def test_texts_apart_are_tried_with_the_attention_that_they_have(
    text: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The text tells where they begin, and a dry run reads none."""
    train = tiny_train(text, task=replace(tiny_task(text), texts="apart"), **changes)
    prepared = train.task.prepare(train, str(tmp_path))
    without_text, with_it = (
        dry_run(train, replicas=2, device="cpu", task=task) for task in (None, prepared)
    )
    assert without_text.components == with_it.components
    assert without_text.evaluation_bytes == with_it.evaluation_bytes


def test_one_worker_holds_no_copy_of_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the peak, in the loss, the head and the last norm would be there twice."""
    narrow = OptimizerConfig(master_dtype="bfloat16", moment_dtype="bfloat16")
    train = small_train(precision="bfloat16", optimizer=narrow, recompute="full", global_batch=16)
    peak = dry_run(train, replicas=1, device="cpu").peak_bytes
    monkeypatch.setattr(lone, "OF_GROUP", ("left to FSDP2",))
    assert dry_run(train, replicas=1, device="cpu").peak_bytes - peak == 2 * (V * D + D)


def test_collectives_are_those_of_a_whole_step(sharded: RankNeeds) -> None:
    found = {(c.group, c.kind): (c.count, c.bytes) for c in sharded.collectives}
    micro_batches = 2 * 4
    # In forward all groups are gathered, in backward the blocks: the head and the root, which is
    # the last norm, stay, and the embedding's backward needs no weight.
    gathered = (2 * LAYERS * BLOCK + ROOT) * 4
    assert found["shard", "all_gather"] == (
        micro_batches * (2 * LAYERS + 3),
        micro_batches * gathered,
    )
    assert found["shard", "reduce_scatter"] == (
        micro_batches * (LAYERS + 3),
        micro_batches * PARAMETERS * 4,
    )
    for kind in ("all_to_all", "all_gather"):
        assert found["replicas", kind][1] == pytest.approx(PARAMETERS * 4 / 2, rel=0.01)
    assert found["shard", "reduce"][0] == found["shard", "broadcast"][0] == 1
    assert found["replicas", "all_reduce"][0] == 1


def test_two_levels_are_counted_apart() -> None:
    """Three nodes with two workers: of each gathered or scattered buffer the first worker sends one
    shard's sixth to each other node, and three of them to its neighbour."""
    layout = ParallelConfig(shard=6, workers_per_node=2)
    train = small_train(parallel=layout, lanes=2, global_batch=12, micro_batch=1)
    found = {(c.group, c.kind): c for c in dry_run(train, replicas=2, device="cuda").collectives}
    # As above, but padded to six shards.
    gathers, scatters = 2 * LAYERS + 3, LAYERS + 3
    nodes, node = found["nodes", "send"], found["node", "send"]
    assert (nodes.ranks, node.ranks) == (3, 2)
    assert nodes.count == 2 * (gathers + scatters)
    buffers = (2 * LAYERS * BLOCK + ROOT + PARAMETERS) * 4
    assert nodes.bytes == pytest.approx(2 / 6 * buffers, rel=0.02)
    assert node.bytes == pytest.approx(3 / 6 * buffers, rel=0.02)
    assert not [
        c
        for c in found.values()
        if c.kind in ("all_gather", "reduce_scatter") and c.group == "shard"
    ]


def test_the_host_waits_in_the_commit_alone(sharded: RankNeeds) -> None:
    # What was counted, two sums inside the replica, one over the replicas.
    assert sharded.host_syncs == 4


def test_a_comparison_in_each_micro_batch_is_a_wait_in_each() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        assert torch.equal(batch, batch)
        return model(batch).square().sum(), len(batch)

    task = CustomTask(
        build_model=lambda: nn.Linear(8, 8), loss_function=loss, dataset=torch.ones(16, 8)
    )
    train = TrainConfig(task=task, steps=2, global_batch=16, micro_batch=4, lanes=1)
    assert dry_run(train, replicas=1, device="cuda").host_syncs == 4 + 1


def test_what_a_chunked_head_compares_at_first_is_no_part_of_a_step() -> None:
    assert dry_run(small_train(loss_chunk=64), replicas=1, device="cuda").host_syncs == 1


def test_rotations_by_length_do_not_ask_how_long_a_sample_is() -> None:
    plain = small_train()
    rotations = {"rope_type": "dynamic", "factor": 1.1, "rope_theta": 1e4}
    model = plain.task.model
    model = replace(model, settings={**model.settings, "rope_parameters": rotations})
    train = replace(plain, task=replace(plain.task, model=model))
    assert dry_run(train, replicas=1, device="cuda").host_syncs == 1


def test_recomputation_and_a_chunked_head_need_less() -> None:
    def needs(**changes: Any) -> dict[str, int]:
        train = small_train(global_batch=16, **changes)
        return dry_run(train, replicas=1, device="cpu").components

    kept, some, none = needs(), needs(recompute="selective"), needs(recompute="full")
    assert none["activations"] < some["activations"] < kept["activations"]
    logits = 16 * 128 * V * 4
    assert kept["logits"] >= 2 * logits
    assert sum(needs(recompute="full", loss_chunk=64).values()) < sum(none.values()) - logits


def test_a_selection_keeps_no_whole_sequences_of_tensor_ranks() -> None:
    """They are gathered again, as where all is computed again; what was scattered is kept."""

    def counts(recompute: Any) -> dict[str, int]:
        train = small_train(recompute=recompute, parallel=ParallelConfig(tensor=2))
        found = dry_run(train, replicas=1, device="cuda").collectives
        return {one.kind: one.count for one in found if one.group == "tensor"}

    kept, some, none = (counts(recompute) for recompute in (None, "selective", "full"))
    assert some["all_gather"] == none["all_gather"] > kept["all_gather"]
    assert some["reduce_scatter"] == kept["reduce_scatter"] < none["reduce_scatter"]


def test_one_lane_among_replicas_takes_one_gradient_and_a_bucket_or_two() -> None:
    bucket = 2**20
    alone, among = (
        dry_run(
            small_train(lanes=n, global_batch=4 * n, bucket_bytes=bucket), replicas=n, device="cuda"
        )
        for n in (1, 4)
    )
    gradient = 4 * PARAMETERS
    for needs in (alone, among):
        assert needs.components["gradients"] == pytest.approx(gradient, rel=0.01)
    assert among.peak_bytes <= alone.peak_bytes + 2 * bucket
    assert among.fault_reserve_bytes == 3 * bucket


def test_lanes_that_wait_on_the_host_do_not_count() -> None:
    bucket = 2**17

    def needs(most: int | None) -> RankNeeds:
        train = small_train(
            lanes=8, global_batch=16, micro_batch=1, lane_buffers=most, bucket_bytes=bucket
        )
        return dry_run(train, replicas=2, device="cuda")

    gradient = 4 * PARAMETERS
    for most, held, reserve in ((None, 3, 0), (1, 1, 0), (4, 3, 1)):
        found = needs(most)
        assert found.components["gradients"] == pytest.approx(held * gradient, rel=0.01)
        more = reserve * gradient if reserve else 3 * bucket
        assert found.fault_reserve_bytes == pytest.approx(more, abs=2**16, rel=0.01)


def test_half_the_bytes_in_bfloat16() -> None:
    def needs(**changes: Any) -> RankNeeds:
        return dry_run(small_train(lanes=2, **changes), replicas=2, device="cuda")

    wide = needs()
    narrow = needs(reduce_dtype="bfloat16", optimizer=OptimizerConfig(moment_dtype="bfloat16"))
    assert narrow.components["optimizer"] == pytest.approx(
        wide.components["optimizer"] / 2, rel=0.01
    )
    sent, before = (
        {c.kind: c.bytes for c in found.collectives if c.group == "replicas"}
        for found in (narrow, wide)
    )
    for kind in ("all_to_all", "all_gather"):
        assert sent[kind] == before[kind] / 2


def test_blocks_that_are_gathered_ahead_take_memory() -> None:
    """Whole ones, in the format of the computation. What is sent is the same."""

    def needs(ahead: int) -> RankNeeds:
        train = small_train(shard=64, global_batch=64, recompute="full", gather_ahead=ahead)
        return dry_run(replace(train, precision="bfloat16"), replicas=1, device="cuda")

    two, three = needs(2), needs(3)
    more = three.peak_bytes - two.peak_bytes
    assert more == pytest.approx(2 * BLOCK, rel=0.1)
    assert two.collectives == three.collectives == needs(1).collectives


def test_bfloat16_masters_take_half_of_the_parameters() -> None:
    def needs(**changes: Any) -> dict[str, int]:
        train = small_train(recompute="full", optimizer=OptimizerConfig(**changes))
        return dry_run(train, replicas=1, device="cuda").components

    wide, narrow = needs(), needs(master_dtype="bfloat16")
    assert narrow["parameters"] == pytest.approx(wide["parameters"] / 2, rel=0.01)
    assert narrow["gradients"] == wide["gradients"] and narrow["optimizer"] == wide["optimizer"]


def test_nothing_is_left_behind(sharded: RankNeeds) -> None:
    assert not dist.is_initialized()
    storage = torch.ones(4).untyped_storage()
    assert storage.resize_(8).nbytes() == 8
    assert "Watch" not in repr(torch.UntypedStorage.resize_)


def test_many_workers_cost_nothing() -> None:
    train = small_train(shard=256, lanes=4, global_batch=1024)
    needs = dry_run(train, replicas=4, device="cuda")
    assert needs.components["parameters"] < PARAMETERS * 4 / 200


def test_an_evaluation_of_a_compiled_step_is_not_compiled() -> None:
    """The logits are there in bfloat16, in float32, and as the latter's softmax."""
    train = small_train(compile="on", precision="bfloat16", recompute="full", global_batch=16)
    needs = dry_run(train, replicas=1, device="cuda")
    weights = 4 * 4 * PARAMETERS
    assert needs.evaluation_bytes > weights + 16 * 128 * V * (2 + 4 + 4) > needs.peak_bytes


def test_an_evaluation_takes_no_more_than_a_compiled_step() -> None:
    """Of a large vocabulary it has logits in bfloat16, and a piece of them in float32."""
    words, tokens = 128_256, 4 * 8192
    train = small_train(compile="on", precision="bfloat16", recompute="full", micro_batch=4)
    settings = {**SETTINGS, "vocab_size": words, "max_position_embeddings": 8192}
    model = replace(train.task.model, settings=settings)
    data = replace(train.task.data, vocab_size=words)
    task = replace(train.task, model=model, data=data, seq_len=8192)
    needs = dry_run(replace(train, task=task), replicas=1, device="cuda")
    logits = tokens * words * 2
    assert logits < needs.evaluation_bytes < needs.peak_bytes
    assert needs.components["logits"] == pytest.approx(2 * logits, rel=0.01)


def test_an_evaluation_is_no_part_of_a_step_and_not_where_nothing_is_held_out() -> None:
    train = small_train(shard=2, lanes=2, global_batch=8)
    text = replace(train.task.data, holdout=0.0)
    without = replace(train, task=replace(train.task, data=text))
    found, none = (dry_run(each, replicas=2, device="cuda") for each in (train, without))
    assert none.evaluation_bytes == 0 < found.evaluation_bytes
    assert replace(found, evaluation_bytes=0) == none


def test_an_evaluation_of_few_samples_takes_no_more_than_these() -> None:
    """For each 8,192 float32 of the model and their squares, beside its 72 weights with their
    gradient and moments."""
    task = CustomTask(
        build_model=lambda: nn.Linear(8, 8),
        loss_function=lambda model, batch: (model(batch).square().sum(), len(batch)),
        dataset=torch.ones(16, 8),
        eval_dataset=torch.ones(256, 1024, 8),
    )
    train = TrainConfig(task=task, steps=2, global_batch=16, lanes=1)
    for held_out, counted in ((1, 1), (16, 16), (256, 16)):
        needs = dry_run(replace(train, eval_samples=held_out), replicas=1, device="cpu")
        expected = 2 * counted * 8192 * 4
        assert needs.evaluation_bytes == pytest.approx(expected, abs=4 * 4 * 72 + 1024)


def test_a_task_of_ones_own() -> None:
    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return (model(x) - y).square().sum(), len(y)

    task = CustomTask(
        build_model=lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)),
        loss_function=loss,
        dataset=[(torch.zeros(64), torch.zeros(8))] * 16,
    )
    train = TrainConfig(
        task=task, steps=2, global_batch=16, lanes=1, parallel=ParallelConfig(shard=2)
    )
    needs = dry_run(train, replicas=1, device="cpu")
    assert needs.parameters == 64 * 512 + 512 + 512 * 8 + 8
    assert needs.components["activations"] > 8 * 512 * 4


class Keeping:
    """A task that keeps its samples in its cache. Implements Task and PreparedTask."""

    def __init__(self) -> None:
        self.prepared_in: list[str] = []

    def prepare(self, train: TrainConfig, cache_dir: str) -> CustomTask:
        self.prepared_in.append(cache_dir)
        path = Path(cache_dir, "samples.pt")
        torch.save(torch.zeros(16, 8), path)

        class Samples(torch.utils.data.Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return 16

            def __getitem__(self, sample: int) -> torch.Tensor:
                found: torch.Tensor = torch.load(path, weights_only=True)[sample]
                return found

        def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
            return model(batch).square().sum(), len(batch)

        return CustomTask(
            build_model=lambda: nn.Linear(8, 8), loss_function=loss, dataset=Samples()
        )


@pytest.mark.parametrize("given", [True, False], ids=["prepared", "as it was given"])
def test_a_task_that_keeps_files(tmp_path: Path, given: bool) -> None:
    """They are there for the dry run, and made once."""
    task = Keeping()
    train = TrainConfig(task=task, steps=2, global_batch=16, lanes=1)
    prepared = task.prepare(train, str(tmp_path)) if given else None
    assert dry_run(train, replicas=1, device="cpu", task=prepared).parameters == 72
    assert len(task.prepared_in) == 1


def test_a_vocabulary_that_only_the_tokenizer_knows_is_read_there() -> None:
    train = small_train()
    task: CausalLM = train.task
    object.__setattr__(task.data, "tokenizer", "somewhere")
    object.__setattr__(
        task.model, "settings", {k: v for k, v in SETTINGS.items() if k != "vocab_size"}
    )
    with pytest.raises(ConfigError, match="does not exist") as error:
        dry_run(train, replicas=1, device="cpu")
    assert error.value.value == "somewhere"


@given(st.sets(st.integers(0, 15)), st.integers(16, 20))
def test_lane_buffers_are_those_that_are_made(lanes: set[int], total: int) -> None:
    sums, home = LaneSums(total, 1, torch.device("cpu")), torch.zeros(1)
    for lane in sums.begin(0, sorted(lanes), home, alone=False):
        sums.open(lane)
        sums.settle(1)
        sums.close(lane, LaneStats(tokens=0, digest=0), torch.zeros(()))
    held = {id(home), *map(id, sums.blocks.values()), *map(id, sums._free)}
    assert len(held) == lane_buffers(sorted(lanes), total)


def test_a_lost_replica_costs_buffers() -> None:
    assert spare_buffers(4, 1, "cpu", None) == 0
    # The other's lane comes beside the own one; on Gloo the gradient moves, too.
    assert spare_buffers(2, 2, "cuda", None) == 1
    assert spare_buffers(2, 2, "cpu", None) == 2
    # The lanes of the lost one are no neighbours of those that take them.
    assert spare_buffers(8, 4, "cuda", None) == 1


@pytest.mark.parametrize(("lanes", "replicas"), [(2, 2), (8, 4), (8, 2), (9, 4), (6, 2), (12, 4)])
def test_on_a_gpu_the_lanes_of_a_lost_replica_wait_on_the_host(lanes: int, replicas: int) -> None:
    """Those of no replica do while all are there."""
    most = plan_lane_buffers(None, lanes, replicas, "cuda")
    dealt = deal_lanes(lanes, tuple(range(replicas))).values()
    assert most == max(lane_buffers(each, lanes) for each in dealt)
    assert spare_buffers(lanes, replicas, "cuda", most) == 0


@pytest.mark.parametrize(("lanes", "replicas"), [(2, 2), (8, 4), (8, 2), (9, 4)])
def test_as_many_buffers_as_are_asked_for_are_on_the_device(lanes: int, replicas: int) -> None:
    asked = plan_lane_buffers(5, lanes, replicas, "cuda")
    assert asked == 5
    assert spare_buffers(lanes, replicas, "cuda", asked) > 0
    assert plan_lane_buffers(None, lanes, replicas, "cpu") is None


def needs_of(size: int) -> RankNeeds:
    return RankNeeds(
        components={"parameters": size},
        fault_reserve_bytes=0,
        parameters=1,
        collectives=(),
        host_syncs=0,
    )


@pytest.mark.parametrize(
    ("size", "verdict", "fits"),
    [
        (20e9, "fits", True),
        (38e9, "tight", True),
        (41e9, "tight", False),
        (50e9, "too large", False),
    ],
)
def test_verdicts(size: float, verdict: str, fits: bool) -> None:
    found = Report(needs=needs_of(int(size)), workers=8, machine=MACHINES["p4d"], nodes=1)
    assert (found.verdict, found.fits) == (verdict, fits)


def test_what_an_evaluation_takes_beyond_a_step_must_be_there() -> None:
    for size, more, fits in ((10e9, 0, True), (30e9, 10e9, True), (50e9, 30e9, False)):
        needs = replace(needs_of(int(20e9)), evaluation_bytes=int(size))
        found = Report(needs=needs, workers=8, machine=MACHINES["p4d"], nodes=1)
        assert found.components["evaluation"] == more
        assert found.needed_bytes == int(1.05 * (20e9 + more)) + CONTEXT_BYTES
        assert found.fits is fits and found.memory_refused is not fits


def test_too_few_machines_do_not_fit() -> None:
    found = Report(needs=needs_of(1), workers=9, machine=MACHINES["p4d"], nodes=1)
    assert found.fits is False and found.lacks_gpus
    assert Report(needs=needs_of(1), workers=9, machine=None, nodes=None).fits is None


def test_changes_leave_the_sums_what_they_were() -> None:
    train = small_train(lanes=None, global_batch=32)
    changes = list(plan_changes(train, 4, blocks=True))
    held = 'recompute="full", loss_chunk=1024, micro_batch=1'
    assert [change.text for change in changes] == [
        'recompute="full"',
        'recompute="full", loss_chunk=1024',
        'recompute="full", loss_chunk=1024, offload=OffloadConfig()',
        'recompute="full", loss_chunk=1024, micro_batch=1',
        'recompute="full", loss_chunk=1024, micro_batch=1, offload=OffloadConfig()',
        f"{held}, lane_buffers=1, shard=2, max_replicas=2, lanes=4",
        f"{held}, lane_buffers=1, shard=4, max_replicas=1, lanes=4",
    ]
    for change in changes:
        told = eval(f"dict({change.text})", {"OffloadConfig": OffloadConfig})
        assert (told.get("lanes") or told.get("max_replicas", 4)) == 4, "what a user writes down"
        change.train.check(change.train.lanes or change.replicas)
        assert (change.train.lanes or change.replicas) == 4
        assert change.train.global_batch == 32
        assert change.replicas * change.train.parallel.workers == 4


def test_what_changes_no_bit_is_tried_first_and_before_another_layout() -> None:
    """Four lanes in one replica; the buffers for one of them, as more is given up."""
    train = small_train(shard=2, lanes=4, global_batch=8, recompute="full", loss_chunk=64)
    changes = plan_changes(replace(train, gather_ahead=3, micro_batch=1), 1, blocks=False)
    assert [change.text for change in changes] == [
        "gather_ahead=1",
        "lane_buffers=1",
        "gather_ahead=1, lane_buffers=1",
    ]
    changes = plan_changes(replace(train, global_batch=16), 2, blocks=False)
    assert [change.text for change in changes] == [
        "lane_buffers=1",
        "micro_batch=1",
        "micro_batch=1, lane_buffers=1",
        "micro_batch=1, lane_buffers=1, shard=4, max_replicas=1",
    ]


@pytest.mark.parametrize(
    ("settings", "wanted", "text"),
    [
        ({"lanes": 8, "global_batch": 8}, {"lane_buffers": 1}, "lane_buffers=1"),
        (
            {"shard": 64, "global_batch": 64, "recompute": "full", "gather_ahead": 3},
            {"gather_ahead": 1},
            "gather_ahead=1",
        ),
        (
            {"recompute": "full", "loss_chunk": 512, "global_batch": 64},
            {"offload": OffloadConfig()},
            "offload=OffloadConfig()",
        ),
    ],
)
def test_one_setting_is_named_where_it_is_enough(
    settings: dict[str, Any], wanted: dict[str, Any], text: str
) -> None:
    train = small_train(**settings)
    assert nearest_for(train, replace(train, **wanted), 1, before=1) == text


def without_blocks(**parallel: Any) -> TrainConfig:
    """A model of one layer, of which a lane has eight samples that are larger than it."""
    task = CustomTask(
        build_model=lambda: nn.Linear(D, D),
        loss_function=lambda model, batch: (model(batch).square().sum(), len(batch)),
        dataset=torch.ones(16, 2 * D, D),
    )
    return TrainConfig(
        task=task, steps=1, global_batch=16, lanes=2, parallel=ParallelConfig(**parallel)
    )


def nearest_for(
    train: TrainConfig, wanted: TrainConfig, replicas: int, *, before: int = 2
) -> str | None:
    """What is said to fit in place of `train`, with `before` replicas, where `wanted` fits, with so
    many."""
    tiny = Machine(name="tiny", gpus=8, memory_bytes=1)
    needed = Judge(device="cuda", machine=tiny, nodes=1).judge(wanted, replicas).needed_bytes
    judge = Judge(device="cuda", machine=replace(tiny, memory_bytes=needed), nodes=None)
    assert judge.judge(train, before).fits is False
    change = judge.nearest(train, before)
    return None if change is None else change.text


def test_a_change_that_cannot_be_is_passed_over() -> None:
    """Without blocks nothing is recomputed; nor is a shard degree named that the strategy
    excludes."""
    train, small = without_blocks(), replace(without_blocks(), micro_batch=1)
    assert nearest_for(train, small, 2) == "micro_batch=1"
    sharded = replace(small, parallel=ParallelConfig(shard=2))
    text = "micro_batch=1, lane_buffers=1, shard=2, max_replicas=1"  # one replica of two lanes
    assert nearest_for(train, sharded, 1) == text
    assert nearest_for(without_blocks(strategy="NO_SHARD"), sharded, 1) is None


@pytest.mark.parametrize("asked", [False, True])
def test_a_router_s_loss_keeps_its_micro_batches(asked: bool) -> None:
    """It is of all tokens of one: of smaller ones it would be another, and others be learned."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": asked}
    experts["num_hidden_layers"] = 1
    model = ModelConfig(architecture="mixtral", settings={**SETTINGS, **experts})
    task = replace(small_train().task, model=model, loss_chunk=128)
    train = small_train(task=task, precision="bfloat16", recompute="full", global_batch=16)
    found = nearest_for(train, replace(train, micro_batch=1), 1, before=1)
    assert found == (None if asked else "micro_batch=1")


def test_attention_takes_more_in_backward_where_keys_have_fewer_heads() -> None:
    query, key = torch.empty(2, 8, 16, 4), torch.empty(2, 2, 16, 4)
    numbers = query.numel()
    assert attention_backward_bytes(query, query, query) == 4 * numbers
    assert attention_backward_bytes(query, query, key) == 4 * numbers + 2 * 4 * numbers


def test_a_second_run_in_the_process_finds_the_same() -> None:
    train = small_train(shard=2, tensor=2, lanes=2)
    first, second = (dry_run(train, replicas=2, device="cuda") for _ in range(2))
    assert first == second
    assert {call.group for call in first.collectives} == {"shard", "tensor", "replica", "replicas"}


def test_what_is_offloaded_is_the_hosts() -> None:
    """Of four blocks' inputs the first two move; one comes back before the next one's is gone."""
    config = OffloadConfig(horizon=1, least_bytes=2**16)

    def needs(**changes: Any) -> RankNeeds:
        train = small_train(global_batch=16, recompute="full", loss_chunk=128, **changes)
        return dry_run(train, replicas=1, device="cuda")

    plain, moved = needs(), needs(offload=config)
    input_bytes = 16 * 128 * D * 4
    assert plain.offloaded_bytes == 0
    assert moved.offloaded_bytes == (LAYERS - 1) * input_bytes
    saved = plain.components["activations"] - moved.components["activations"]
    assert input_bytes <= saved <= (LAYERS - 1) * input_bytes


@pytest.mark.parametrize(("gib", "fits"), [(1, False), (3, True), (None, True)])
def test_the_host_has_room_for_half(gib: int | None, fits: bool) -> None:
    needs = RankNeeds(
        components={"activations": 1},
        fault_reserve_bytes=0,
        parameters=1,
        collectives=(),
        host_syncs=0,
        offloaded_bytes=2**28,
    )
    host_bytes = None if gib is None else gib * 2**30
    machine = replace(MACHINES["p4d"], gpus=4, host_memory_bytes=host_bytes)
    report = Report(needs=needs, workers=16, machine=machine, nodes=4)
    assert report.offloaded_bytes == 4 * 2**28
    assert report.fits is fits
    assert report.verdict == "fits"
    assert report.to_json()["offloaded_bytes"] == 2**30
