"""The global order: a permutation in every epoch, pure, the same wherever it is cut."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.order import mix, sample_ids

M = 2**64
GOLDEN = 0x9E3779B97F4A7C15

seeds = st.integers(-(2**70), 2**70)


def mix_reference(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % M
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % M
    return z ^ (z >> 31)


def sample_id_reference(seed: int, position: int, n: int) -> int:
    """The documented definition, one position at a time, in Python's unbounded integers."""
    epoch, value = divmod(position, n)
    key = mix_reference((mix_reference((seed + GOLDEN) % M) + epoch * GOLDEN) % M)
    half = max(1, math.ceil((n - 1).bit_length() / 2))
    while True:
        left, right = divmod(value, 2**half)
        for number in range(1, 9):
            word = mix_reference(right ^ mix_reference((key + number * GOLDEN) % M))
            left, right = right, left ^ (word >> (64 - half))
        value = left * 2**half + right
        if value < n:
            return value


def test_the_hash_is_splitmix64() -> None:
    # First outputs of splitmix64 for the seed 1234567, as published with its reference code.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + GOLDEN * turn) % M for turn in (1, 2, 3)]
    assert mix(np.array(states, dtype=np.uint64)).tolist() == published


@given(seed=seeds, start=st.integers(0, 2**62), n=st.integers(1, 2**62))
def test_agrees_with_the_definition(seed: int, start: int, n: int) -> None:
    ids = sample_ids(seed, start, 3, n)
    assert ids.dtype == np.int64
    assert ids.tolist() == [sample_id_reference(seed, start + i, n) for i in range(3)]


@given(seed=seeds, epoch=st.integers(0, 2**40), n=st.integers(1, 300))
def test_every_epoch_uses_every_sample_once(seed: int, epoch: int, n: int) -> None:
    assert sorted(sample_ids(seed, epoch * n, n, n).tolist()) == list(range(n))


@given(
    seed=seeds,
    start=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 40), max_size=5),
    n=st.integers(1, 100),
)
def test_slices_join(seed: int, start: int, counts: list[int], n: int) -> None:
    pieces, position = [], start
    for count in counts:
        pieces += sample_ids(seed, position, count, n).tolist()
        position += count
    assert pieces == sample_ids(seed, start, sum(counts), n).tolist()


def test_seeds_and_epochs_differ() -> None:
    n = 1000
    five_epochs = [sample_ids(seed, 0, 5 * n, n).reshape(5, n) for seed in range(5)]
    orders = {order.tobytes() for epochs in five_epochs for order in epochs}
    assert len(orders) == 25


def test_all_orders_of_a_small_epoch_are_about_equally_likely() -> None:
    n, epochs = 4, 6000
    counts = Counter(map(tuple, sample_ids(7, 0, n * epochs, n).reshape(epochs, n).tolist()))
    expected = epochs / 24
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 24
    assert chi_squared < 56  # 23 degrees of freedom: exceeded by chance once in 10,000


@pytest.mark.parametrize(
    ("start", "count", "n"), [(-1, 1, 5), (0, -1, 5), (0, 1, 0), (2**63 - 1, 1, 5), (0, 1, 2**63)]
)
def test_what_has_no_order_is_refused(start: int, count: int, n: int) -> None:
    with pytest.raises(ValueError, match="need start"):
        sample_ids(0, start, count, n)
