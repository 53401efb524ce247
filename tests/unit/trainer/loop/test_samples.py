"""Which samples a step takes, and the ledger that proves it."""

from __future__ import annotations

import hashlib
import itertools
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import ParallelConfig, TrainConfig
from trainer.data import sample_ids
from trainer.loop.samples import (
    Ledger,
    LedgerError,
    Skip,
    lane_ids,
    micro_batches,
    micro_seed,
    samples_sha256,
    step_ids,
)
from trainer.replication.step_commit import sample_digest

SAMPLES = 50


def config_with(shard: int = 2, **changes: Any) -> TrainConfig:
    settings = {"task": None, "steps": 10, "global_batch": 24, "seed": 5, **changes}
    return TrainConfig(parallel=ParallelConfig(shard=shard), **settings)


def ledger(train: TrainConfig, lanes: int, steps: int) -> list[tuple[int, list[int]]]:
    """What the workers would have committed, cut out of the run's one order of samples."""
    order = sample_ids(train.seed, 0, steps * train.global_batch, SAMPLES)
    size, shards = train.global_batch // (lanes * train.parallel.shard), train.parallel.shard

    def lane(step: int, index: int) -> int:
        firsts = range(index * shards * size, (index + 1) * shards * size, size)
        start = step * train.global_batch
        return sum(sample_digest(order[start + f : start + f + size], f) for f in firsts)

    return [(step, [lane(step, index) for index in range(lanes)]) for step in range(steps)]


@settings(deadline=None)
@given(
    lanes=st.integers(1, 6),
    shard=st.integers(1, 3),
    size=st.integers(1, 3),
    samples=st.integers(1, 60),
    step=st.integers(0, 100),
)
def test_lanes_and_shards_take_the_step_apart(
    lanes: int, shard: int, size: int, samples: int, step: int
) -> None:
    train = config_with(shard, global_batch=lanes * shard * size)
    parts = [
        lane_ids(train, lanes, samples, step, lane, index).tolist()
        for lane in range(lanes)
        for index in range(shard)
    ]
    assert {len(part) for part in parts} == {size}
    assert list(itertools.chain(*parts)) == step_ids(train, samples, step).tolist()


def test_an_epoch_takes_every_sample_once() -> None:
    train = config_with(global_batch=10)
    epoch = [number for step in range(5) for number in step_ids(train, SAMPLES, step).tolist()]
    assert sorted(epoch) == list(range(SAMPLES))


def test_another_seed_takes_other_samples() -> None:
    one, other = (step_ids(config_with(seed=seed), 1000, 0).tolist() for seed in (0, 1))
    assert one != other


def test_micro_seeds_differ_in_every_part_and_suit_torch() -> None:
    parts = list(itertools.product(range(4), range(6), range(6), range(4), range(4)))
    seeds = {micro_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))


def test_a_micro_seed_is_a_function_of_its_parts() -> None:
    assert micro_seed(1, 2, 3) == micro_seed(1, 2, 3)
    assert len({micro_seed(*part) for part in itertools.permutations((1, 2, 3))}) == 6
    assert micro_seed(-1, 0) == micro_seed(2**64 - 1, 0)


@pytest.mark.parametrize(("lanes", "shard"), [(1, 1), (4, 1), (2, 2), (3, 4)])
def test_the_hash_is_that_of_the_samples_in_order(lanes: int, shard: int) -> None:
    train = config_with(shard, steps=3)
    order = sample_ids(5, 0, 3 * 24, SAMPLES).tolist()
    expected = hashlib.sha256(struct.pack("<72q", *order)).hexdigest()
    assert samples_sha256(train, lanes, SAMPLES, ledger(train, lanes, 3)) == expected


def test_no_steps_hash_to_the_empty_hash() -> None:
    empty = hashlib.sha256().hexdigest()
    assert samples_sha256(config_with(steps=0), 2, SAMPLES, []) == empty


@pytest.mark.parametrize(
    ("kept", "missing"),
    [([0, 2, 3], 1), ([1, 2], 0), ([0, 1, 1, 2], 2), ([1, 0], 0), ([0, 1, 2], 3), ([], 0)],
)
def test_a_missing_step_is_found(kept: list[int], missing: int) -> None:
    train = config_with(steps=4)
    committed = ledger(train, 2, 4)
    with pytest.raises(LedgerError) as caught:
        samples_sha256(train, 2, SAMPLES, [committed[step] for step in kept])
    assert caught.value.step == missing


def test_other_samples_are_found() -> None:
    train = config_with()
    committed = ledger(train, 3, 4)
    committed[2][1][1] += 1
    with pytest.raises(LedgerError, match="step 2, lane 1"):
        samples_sha256(train, 3, SAMPLES, committed)


@pytest.mark.parametrize(
    ("changes", "lanes"), [({"seed": 6}, 3), ({}, 2), ({"global_batch": 12}, 3)]
)
def test_a_ledger_of_another_run_is_refused(changes: dict[str, int], lanes: int) -> None:
    committed = ledger(config_with(steps=2), 3, 2)
    with pytest.raises(LedgerError, match="step 0, lane 0"):
        samples_sha256(config_with(steps=2, **changes), lanes, SAMPLES, committed)


def test_the_ledger_does_not_depend_on_the_shard_degree() -> None:
    one, two = (ledger(config_with(shard, steps=2), 3, 2) for shard in (1, 2))
    assert one == two


def test_data_that_are_passed_over_are_taken_by_no_step() -> None:
    train = config_with(1, global_batch=4, steps=12)
    skips = (Skip(3, 2), Skip(3, 1), Skip(6, 4))
    batches = [0, 1, 2, *(5 + 1, 6 + 1, 7 + 1), *(8 + 1 + 4, 9 + 1 + 4)]  # by hand, of steps 0 to 7
    for step, batch in enumerate(batches):
        expected = sample_ids(5, 4 * batch, 4, SAMPLES).tolist()
        assert step_ids(train, SAMPLES, step, skips).tolist() == expected
        parts = [lane_ids(train, 2, SAMPLES, step, lane, 0, skips) for lane in range(2)]
        assert list(itertools.chain(*(part.tolist() for part in parts))) == expected
        read = micro_batches(
            train,
            2,
            SAMPLES,
            0,
            steps=range(step, step + 1),
            missing=[0, 1],
            dealt=lambda _: [0, 1],
            skips=skips,
        )
        assert list(itertools.chain(*(ids.tolist() for ids in read))) == expected


def test_the_ledger_knows_what_is_passed_over() -> None:
    plain = Ledger(seed=5, global_batch=4, lanes=2, samples=SAMPLES)
    skipping = Ledger(seed=5, global_batch=4, lanes=2, samples=SAMPLES, skips=(Skip(3, 2),))
    assert skipping.digests(2) == plain.digests(2)
    assert skipping.check(3, plain.digests(5)).tolist() == sample_ids(5, 20, 4, SAMPLES).tolist()
    with pytest.raises(LedgerError, match="step 3, lane 0"):
        skipping.check(3, plain.digests(3))
