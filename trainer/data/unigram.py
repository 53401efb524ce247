"""The loss of a model that has learnt nothing but how often each token occurs.

A trained model must be below it; a model at it has not learnt from context. Needs counts only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.data.tokens import TokenSet

Counts = np.ndarray[Any, np.dtype[np.int64]]


def unigram_cross_entropy(train: TokenSet, val: TokenSet, val_targets: int | None = None) -> float:
    """Score held-out tokens under the training set's unigram distribution, add-one smoothed.

    Args:
        train: its tokens, all of them, give the distribution.
        val: the set to score; its first token is never a target.
        val_targets: score the targets 1 .. val_targets, by default to the end. What all windows of
            a `TokenDataset` over `val` score is `len(dataset) * dataset.seq_len`.

    Returns:
        Nats per token.

    Raises:
        ValueError: the sets differ in vocabulary, or `val` has not that many targets.
    """
    targets = len(val) - 1 if val_targets is None else val_targets
    if train.index.vocab_size != val.index.vocab_size:
        raise ValueError(
            f"vocabularies of {train.index.vocab_size} and {val.index.vocab_size} tokens: "
            f"prepare both sets with one tokenizer"
        )
    if not 1 <= targets <= len(val) - 1:
        raise ValueError(f"{targets} targets asked of {len(val)} held-out tokens")
    train_counts = _count(train, 0, len(train))
    val_counts = _count(val, 1, targets + 1)
    probabilities = (train_counts + 1) / (len(train) + train.index.vocab_size)
    return float(-(val_counts * np.log(probabilities)).sum() / targets)


def _count(tokens: TokenSet, start: int, stop: int) -> Counts:
    counts = np.zeros(tokens.index.vocab_size, dtype=np.int64)
    for chunk in tokens.chunks(start, stop):
        counts += np.bincount(chunk, minlength=tokens.index.vocab_size)
    return counts
