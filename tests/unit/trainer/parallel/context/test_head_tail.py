"""All rounds of a ring together compute each pair of tokens that a mask leaves, once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.parallel.context.head_tail import plan_blocks, stretches

Starts = Sequence[Sequence[int]]


def pairs_of(
    workers: int, seq_len: int, documents: Starts | None, samples: int
) -> NDArray[np.int64]:
    """How often each query met each key, by (sample, query, key); and that all workers have as much
    to do in each round, where texts are joined."""
    met = np.zeros((samples, seq_len, seq_len), dtype=np.int64)
    for round_ in range(workers):
        work = []
        for rank in range(workers):
            source = (rank - round_) % workers
            mine = np.concatenate([np.arange(*s) for s in stretches(rank, workers, seq_len)])
            theirs = np.concatenate([np.arange(*s) for s in stretches(source, workers, seq_len)])
            before = met.sum()
            for block in plan_blocks(rank, source, workers, len(mine), documents):
                of = range(samples) if block.sample is None else [block.sample]
                queries, keys = mine[block.queries], theirs[block.keys]
                seen = np.ones((len(queries), len(keys)), dtype=np.int64)
                if block.causal:
                    assert len(queries) == len(keys)
                    seen = np.tril(seen)
                for sample in of:
                    met[sample][np.ix_(queries, keys)] += seen
            work.append(met.sum() - before)
        if documents is None:
            assert max(work) - min(work) == 0
    return met


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_causal_mask(workers: int) -> None:
    met = pairs_of(workers, 24, None, 2)
    assert (met == np.tril(np.ones((24, 24)))).all()


@given(
    workers=st.integers(1, 4),
    begins=st.lists(st.sets(st.integers(1, 23)), min_size=1, max_size=2),
)
def test_texts_apart(workers: int, begins: list[set[int]]) -> None:
    documents = [[0, *sorted(more)] for more in begins]
    met = pairs_of(workers, 24, documents, len(documents))
    for sample, starts in enumerate(documents):
        text = np.searchsorted(starts, np.arange(24), side="right")
        assert (met[sample] == np.tril(text[:, None] == text[None, :])).all()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_token_is_somebodys(workers: int) -> None:
    all_ = [n for rank in range(workers) for s in stretches(rank, workers, 12) for n in range(*s)]
    assert sorted(all_) == list(range(12))
