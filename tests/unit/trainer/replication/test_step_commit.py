"""The commit vector: what goes in comes out, in whatever order it is summed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.replication.step_commit import (
    DIGEST_BITS,
    LaneStats,
    Saving,
    pack,
    read_drawn,
    sample_digest,
    unpack,
)
from trainer.replication.witnesses import Drawn


@pytest.mark.parametrize("tokens", [12.7, 0.3, math.nan, math.inf])
def test_a_count_that_would_be_cut_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="no whole number"):
        LaneStats(tokens=tokens, digest=0)


def test_the_layout_of_the_vector() -> None:
    stats = {
        2: LaneStats(tokens=7, digest=99),
        0: LaneStats(tokens=3, digest=11),
    }
    losses = {0: 0.5, 2: 1.5}
    busy = Saving(wanted=True, busy=frozenset({"memory"}))
    rest: dict[str, Any] = {"saving": busy, "recorded": 9, "overwritten": False}
    rest |= {"gradients": {0: 5.0, 2: 6.0}, "witnessed": (1, 8.0)}
    vector = pack(3, stats, losses, norm_squared=4.0, failed=False, boundary=True, **rest)
    head = [4.0, 0.0, 1.0, 1.0, 9.0, 0.0, 0.0, 1.0]
    lanes = [0.5, 0.0, 1.5, 3.0, 0.0, 7.0, 11.0, 0.0, 99.0, 5.0, 0.0, 6.0]
    assert vector == [*head, *lanes, 0.0, 0.0, 1.0, 8.0]
    rest = {"saving": Saving(), "recorded": 0, "overwritten": True, "gradients": {}}
    failed = pack(2, {}, {}, norm_squared=0.0, failed=True, boundary=False, **rest)
    assert failed == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, *[0.0] * 14]


def test_a_summed_vector_is_read() -> None:
    sums = [36.0, 0.0, 0.0, 0.0, 15.0, 0.0, 3.0, 0.0, 2.0, 4.0, 1.0, 2.0, 8.0, 9.0, 6.0, 7.0]
    sums += [2.0, 5.0, 0.0, 0.0]  # of the first witness's two workers
    assert read_drawn(sums, Drawn(lane=1, owner=4, witnesses=(5, 0)), 2) == {4: 7, 5: 5}
    commit = unpack(sums, step=17, lanes=2)
    assert (commit.step, commit.tokens, commit.sample_digests) == (17, 3, [8, 9])
    assert commit.recorded == 15
    assert commit.loss == 2.0  # 6 nats over 3 tokens
    assert commit.grad_norm == 2.0  # root of 36 over 3 tokens
    assert commit.finite
    assert not commit.boundary
    assert commit.saving == Saving(wanted=False, busy=frozenset({"store"}))


lane_stats = st.builds(
    LaneStats, tokens=st.integers(0, 2**20), digest=st.integers(0, 2**DIGEST_BITS - 1)
)


@settings(deadline=None)
@given(
    counted=st.lists(st.tuples(lane_stats, st.floats(0, 1e6)), min_size=1, max_size=9),
    replicas=st.integers(1, 4),
    shift=st.integers(0, 3),
    data=st.data(),
)
def test_the_order_of_the_replicas_does_not_matter(
    counted: list[tuple[LaneStats, float]], replicas: int, shift: int, data: st.DataObject
) -> None:
    lanes, stats = len(counted), [stat for stat, _ in counted]
    losses = {lane: loss for lane, (_, loss) in enumerate(counted)}
    vectors = [
        pack(
            lanes,
            {lane: stats[lane] for lane in range(lanes) if (lane + shift) % replicas == replica},
            losses,
            norm_squared=0.0,
            failed=False,
            boundary=replica == 1,
            saving=Saving(wanted=replica == 2),
            recorded=0,
            overwritten=False,
            gradients={lane: 2.0**32 - 1 for lane in range(9)},
        )
        for replica in range(replicas)
    ]
    order = data.draw(st.permutations(vectors))
    commit = unpack(np.sum(order, axis=0).tolist(), step=0, lanes=lanes)
    tokens = sum(stat.tokens for stat in stats)
    assert commit.tokens == tokens
    assert commit.sample_digests == [stat.digest for stat in stats]
    assert commit.loss == sum(losses.values()) / max(1, tokens)
    assert commit.boundary == (replicas > 1)
    assert commit.saving == Saving(wanted=replicas > 2)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_bad_loss_in_one_lane_makes_the_step_non_finite(loss: float) -> None:
    vectors = [
        pack(
            2,
            {lane: LaneStats(tokens=5, digest=lane + 1)},
            {lane: value},
            norm_squared=float(lane),
            failed=False,
            boundary=False,
            saving=Saving(),
            recorded=0,
            overwritten=False,
            gradients={lane: 2.0**32 - 1 for lane in range(9)},
        )
        for lane, value in ((0, 1.0), (1, loss))
    ]
    commit = unpack(np.sum(vectors, axis=0).tolist(), step=0, lanes=2)
    assert not commit.finite
    assert (commit.tokens, commit.sample_digests) == (10, [1, 2])


@pytest.mark.parametrize("norm_squared", [math.nan, math.inf, -1.0])
def test_a_bad_gradient_makes_the_step_non_finite(norm_squared: float) -> None:
    vector = pack(
        1,
        {0: LaneStats(tokens=5, digest=1)},
        {0: 1.0},
        norm_squared=norm_squared,
        failed=False,
        boundary=False,
        saving=Saving(),
        recorded=0,
        overwritten=False,
        gradients={0: 1},
    )
    assert not unpack(vector, step=0, lanes=1).finite


def test_a_step_without_tokens_has_a_loss_of_zero() -> None:
    commit = unpack([0.0] * 16, step=0, lanes=1)
    assert (commit.loss, commit.grad_norm, commit.finite) == (0.0, 0.0, True)


def mix(x: int) -> int:
    """splitmix64's finaliser, on Python's own integers."""
    mask = 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def test_the_digest_sums_a_hash_of_each_position_and_id() -> None:
    ids = [3, 2**40, 0]
    golden = 0x9E3779B97F4A7C15
    hashes = [mix(mix((7 + i + golden) % 2**64) ^ number) >> 32 for i, number in enumerate(ids)]
    assert sample_digest(np.array(ids), 7) == sum(hashes)
    assert sample_digest(np.array([], dtype=np.int64), 7) == 0


def test_the_digests_of_the_parts_of_a_lane_add_up_to_the_lanes() -> None:
    ids = np.random.default_rng(0).integers(0, 2**40, 12)
    for cut in range(13):
        parts = sample_digest(ids[:cut], 20) + sample_digest(ids[cut:], 20 + cut)
        assert parts == sample_digest(ids, 20)


def test_the_digest_depends_on_the_ids_their_order_and_their_place() -> None:
    ids = np.arange(10)
    digest = sample_digest(ids, 0)
    assert digest != sample_digest(ids[::-1], 0)
    assert digest != sample_digest(ids[:9], 0)
    assert digest != sample_digest(ids, 1)


def test_the_digests_of_two_million_samples_add_up_exactly() -> None:
    most = 2**DIGEST_BITS - 1
    assert most == 2**32 - 1
    assert float(most * 2**21) == most * 2**21 < 2**53
