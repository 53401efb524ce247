"""Batches of windows, from our token sets and from map-style datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.dataset import MapDataset, SampleSource, TokenDataset
from trainer.data.tokens import TokenWriter
from trainer.errors import ConfigError


@pytest.fixture
def twelve(tmp_path: Path) -> Path:
    with TokenWriter(
        tmp_path / "set", vocab_size=100, file_tokens=5, tokenizer="t", source="s"
    ) as writer:
        writer.write(np.arange(50, 62))
    return tmp_path / "set"


def test_windows_overlap_by_one_token(twelve: Path) -> None:
    dataset: SampleSource = TokenDataset(twelve, seq_len=3)
    assert len(dataset) == 3  # 11 targets are 3 windows of 3 and a rest
    batch = dataset.batch(np.array([2, 0]))
    assert isinstance(batch, torch.Tensor)
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[56, 57, 58, 59], [50, 51, 52, 53]]


def test_a_window_may_be_the_whole_set(twelve: Path) -> None:
    dataset = TokenDataset(twelve, seq_len=11)
    assert len(dataset) == 1
    assert dataset.batch(np.array([0])).tolist() == [list(range(50, 62))]
    assert dataset.batch(np.array([], dtype=np.int64)).shape == (0, 12)


def test_too_little_text_is_rejected(twelve: Path) -> None:
    with pytest.raises(ConfigError, match="12 tokens found, 13 needed") as caught:
        TokenDataset(twelve, seq_len=12)
    assert caught.value.field == "train.task.data.paths"


@pytest.mark.parametrize("number", [-1, 3])
def test_an_id_outside_the_dataset_is_refused(twelve: Path, number: int) -> None:
    with pytest.raises(IndexError, match="dataset of 3"):
        TokenDataset(twelve, seq_len=3).batch(np.array([0, number]))


def test_a_map_style_dataset_is_collated_in_order() -> None:
    items = [{"x": torch.tensor([number, 10 * number]), "name": str(number)} for number in range(4)]
    dataset: SampleSource = MapDataset(items)
    assert len(dataset) == 4
    batch = dataset.batch(np.array([3, 1]))
    assert isinstance(batch, dict)
    assert batch["x"].tolist() == [[3, 30], [1, 10]]
    assert batch["name"] == ["3", "1"]
