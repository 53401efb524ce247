"""The unigram baseline, against the definition written out with plain Python."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from trainer.data.dataset import TokenDataset
from trainer.data.tokens import TokenSet, TokenWriter
from trainer.data.unigram import unigram_cross_entropy

TRAIN = [0, 1, 1, 2, 2, 2, 5]
VAL = [7, 1, 2, 4, 2, 0]


def write_set(directory: Path, ids: list[int], vocab_size: int = 8) -> TokenSet:
    with TokenWriter(
        directory, vocab_size=vocab_size, file_tokens=3, tokenizer="t", source="s"
    ) as writer:
        writer.write(np.array(ids, dtype=np.int64))
    return TokenSet.open(directory)


def expected(targets: list[int]) -> float:
    counts = Counter(TRAIN)
    losses = [-math.log((counts[token] + 1) / (len(TRAIN) + 8)) for token in targets]
    return sum(losses) / len(losses)


def test_scores_all_targets_or_those_of_the_windows(tmp_path: Path) -> None:
    train, val = write_set(tmp_path / "train", TRAIN), write_set(tmp_path / "val", VAL)
    assert unigram_cross_entropy(train, val) == pytest.approx(expected(VAL[1:]), rel=1e-12)
    windows = TokenDataset(tmp_path / "val", seq_len=2)
    targets = windows.batch(np.arange(len(windows)))[:, 1:].flatten().tolist()
    assert unigram_cross_entropy(train, val, len(windows) * 2) == pytest.approx(
        expected(targets), rel=1e-12
    )


@pytest.mark.parametrize("val_targets", [0, 6])
def test_targets_that_are_not_there_are_refused(tmp_path: Path, val_targets: int) -> None:
    train, val = write_set(tmp_path / "train", TRAIN), write_set(tmp_path / "val", VAL)
    with pytest.raises(ValueError, match="of 6 held-out tokens"):
        unigram_cross_entropy(train, val, val_targets)


def test_sets_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    train, val = write_set(tmp_path / "train", TRAIN), write_set(tmp_path / "val", VAL, 9)
    with pytest.raises(ValueError, match="8 and 9 tokens"):
        unigram_cross_entropy(train, val)
