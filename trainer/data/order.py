"""The global order of samples: a pure function of (seed, position), the same on every platform.

Positions run on without end through epochs; each epoch is its own permutation of all samples.
Nothing is stored and nothing is shuffled in memory: the permutation is a keyed bijection, evaluated
at the positions asked for, so any worker can say which sample is at any position, at any time.

How: a balanced Feistel network of `ROUNDS` rounds over the smallest even number of bits that holds
`n_samples`; where the result is not below `n_samples`, it is put through again until it is
("cycle walking"), which keeps it a bijection and takes under four turns on average. The round
function and the key schedule are the splitmix64 finaliser. The definition is frozen: a change to it
changes every run's data order.

Source: Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 3 (cycle
walking); Luby & Rackoff 1988 (Feistel); Steele, Lea & Flood, "Fast Splittable Pseudorandom Number
Generators" (OOPSLA 2014), splitmix64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDS = 8

Ids = np.ndarray[Any, np.dtype[np.int64]]
_Words = np.ndarray[Any, np.dtype[np.uint64]]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = 2**64 - 1


def sample_ids(seed: int, start: int, count: int, n_samples: int) -> Ids:
    """Return the sample ids at the global positions `start` to `start + count`.

    Called on every rank, for whatever positions its lanes cover; time and memory are O(count).

    Args:
        seed: any integer; taken modulo 2**64.
        start: first position, from 0; epoch `e` is the positions `e * n_samples` and on.
        count: how many positions.
        n_samples: samples per epoch.

    Shapes: returns (count,), each in [0, n_samples).

    Raises:
        ValueError: a negative position or count, no samples, or a position that int64 cannot hold.
    """
    if start < 0 or count < 0 or n_samples < 1 or max(start + count, n_samples) >= 2**63:
        raise ValueError(
            f"start {start}, count {count} and n_samples {n_samples}: need start >= 0, count >= 0, "
            f"n_samples >= 1, all below 2**63"
        )
    positions = np.arange(start, start + count, dtype=np.int64)
    epochs, indices = np.divmod(positions, n_samples)
    keys = _epoch_keys(seed, epochs.astype(np.uint64))
    return _permute(indices.astype(np.uint64), keys, n_samples).astype(np.int64)


def mix(words: _Words) -> _Words:
    """Scramble each 64-bit word by the bijective finaliser of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _epoch_keys(seed: int, epochs: _Words) -> _Words:
    seeded = mix(np.full_like(epochs, (seed + _GOLDEN) & _MASK_64))
    return mix(seeded + epochs * np.uint64(_GOLDEN))


def _permute(values: _Words, keys: _Words, n_samples: int) -> _Words:
    half_bits = max(1, ((n_samples - 1).bit_length() + 1) // 2)
    result = _feistel(values, keys, half_bits)
    while (outside := np.flatnonzero(result >= np.uint64(n_samples))).size:
        result[outside] = _feistel(result[outside], keys[outside], half_bits)
    return result


def _feistel(values: _Words, keys: _Words, half_bits: int) -> _Words:
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    high_bits = np.uint64(64 - half_bits)
    left, right = values >> shift, values & mask
    for number in range(1, ROUNDS + 1):
        round_keys = mix(keys + np.uint64(number * _GOLDEN & _MASK_64))
        left, right = right, left ^ (mix(right ^ round_keys) >> high_bits)
    joined: _Words = (left << shift) | right
    return joined
