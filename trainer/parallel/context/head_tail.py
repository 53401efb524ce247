"""Which tokens of a sequence each worker of a ring has, and which of its queries meet which keys.
Pure.

The sequence is cut into 2 n stretches for n workers, and worker r has those of number r and
2 n - 1 - r: one from the head, where a causal mask leaves few keys, and one from the tail, where it
leaves many. So all workers have the same to do, in every round of the ring. Source: Dubey et al.,
The Llama 3 Herd of Models, 2024, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Block(NamedTuple):
    """Queries of one worker that meet keys of one, in a single call of a kernel."""

    sample: int | None
    """Which sample of the micro-batch; None: all of them."""
    queries: slice
    """Of the tokens that the one worker has."""
    keys: slice
    """Of the tokens that the other has."""
    causal: bool
    """Queries and keys are the same tokens, and none meets a later one; else all meet all."""


def stretches(rank: int, workers: int, seq_len: int) -> list[tuple[int, int]]:
    """(start, end) of the worker's tokens in the sequence, in their order.

    Args:
        rank: of the worker in the ring.
        workers: in the ring.
        seq_len: tokens of the whole; a multiple of twice the workers, where there are several.
    """
    if workers == 1:
        return [(0, seq_len)]
    size = seq_len // (2 * workers)
    return [(n * size, (n + 1) * size) for n in (rank, 2 * workers - 1 - rank)]


def plan_blocks(
    rank: int,
    source: int,
    workers: int,
    tokens: int,
    documents: Sequence[Sequence[int]] | None = None,
) -> list[Block]:
    """What a worker computes in the round in which it has the keys of `source`.

    Args:
        rank: of the worker in the ring.
        source: whose keys they are.
        workers: in the ring.
        tokens: that each has of a sample.
        documents: where the texts of each sample begin in the whole sequence, 0 first, where no
            token may see one of another text; None: each sample is one.
    """
    if documents is not None:
        return list(_of_documents(rank, source, workers, tokens, documents))
    whole = slice(0, tokens)
    if source == rank:
        return [Block(None, whole, whole, True)]  # its tokens are in order: one mask for both
    if source < rank:
        return [Block(None, whole, slice(0, tokens // 2), False)]
    return [Block(None, slice(tokens // 2, tokens), whole, False)]


def _of_documents(
    rank: int, source: int, workers: int, tokens: int, documents: Sequence[Sequence[int]]
) -> Iterator[Block]:
    seq_len = tokens * workers
    mine, theirs = stretches(rank, workers, seq_len), stretches(source, workers, seq_len)
    for sample, starts in enumerate(documents):
        for document in pairwise([*starts, seq_len]):
            for queries, at in _placed(mine, document):
                for keys, from_ in _placed(theirs, document):
                    if from_ <= at:
                        yield Block(sample, queries, keys, from_ == at)


def _placed(
    stretches: Sequence[tuple[int, int]], document: tuple[int, int]
) -> Iterator[tuple[slice, int]]:
    """The tokens of a document among a worker's, and where each part begins in the sequence."""
    before = 0
    for start, end in stretches:
        first, last = max(start, document[0]), min(end, document[1])
        if first < last:
            yield slice(before + first - start, before + last - start), first
        before += end - start
