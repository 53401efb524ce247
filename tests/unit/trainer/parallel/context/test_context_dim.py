"""What a worker takes of a micro-batch, and which settings do not go with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.small_llama import small_train
from trainer.config import ParallelConfig
from trainer.data import TextDataset
from trainer.data.batches import to_device
from trainer.data.token_batch import TokenBatch
from trainer.data.tokens import TokenWriter
from trainer.errors import ConfigError
from trainer.parallel.context.dim import ContextParallel
from trainer.parallel.context.precision import check_kernel
from trainer.tasks.custom import CustomTask


def test_a_worker_takes_head_and_tail() -> None:
    windows = torch.arange(18).reshape(2, 9)
    part = ContextParallel(degree=2).part(windows, 1)
    assert part.inputs.tolist() == [[2, 3, 4, 5], [11, 12, 13, 14]]
    assert part.targets.tolist() == [[3, 4, 5, 6], [12, 13, 14, 15]]
    assert part.positions is not None and part.positions.tolist() == [[2, 3, 4, 5]]
    first = ContextParallel(degree=2).part(windows, 0)
    assert first.inputs.tolist() == [[0, 1, 6, 7], [9, 10, 15, 16]]


def test_texts_begin_after_their_end(tmp_path: Path) -> None:
    place = tmp_path / "tokens"
    with TokenWriter(place, vocab_size=16, file_tokens=64, tokenizer="", source="") as writer:
        writer.write(np.array([5, 0, 6, 7, 0, 0, 8, 9, 0, 1, 2, 3, 4], dtype=np.uint32))
    batch = TextDataset(place, 6, end_id=0).batch(np.array([0, 1]))
    assert batch.documents is not None
    assert [starts.tolist() for starts in batch.documents] == [[0, 2, 5], [0, 3]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2]]
    assert batch.targets.tolist() == [[0, 6, 7, 0, 0, 8], [9, 0, 1, 2, 3, 4]]
    moved = to_device(batch, torch.device("cpu"))
    assert isinstance(moved, TokenBatch)
    assert [starts.tolist() for starts in moved.documents or ()] == [[0, 2, 5], [0, 3]]


@pytest.mark.parametrize(
    ("parallel", "seq_len"),
    [({"context": 0}, 128), ({"context": 3}, 128), ({"context": 2, "tensor": 2}, 124)],
)
def test_a_length_that_is_no_multiple_is_refused(parallel: dict[str, Any], seq_len: int) -> None:
    train = small_train(parallel=ParallelConfig(**parallel))
    train = replace(train, task=replace(train.task, seq_len=seq_len))
    with pytest.raises(ConfigError, match=r"train\.parallel\.context"):
        train.check(1)


def test_a_custom_task_has_no_sequences() -> None:
    task = CustomTask(build_model=torch.nn.Identity, loss_function=max, dataset=[1])
    train = replace(small_train(parallel=ParallelConfig(context=2)), task=task)
    with pytest.raises(ConfigError, match="does not say which of its tensors are sequences"):
        train.check(1)


@pytest.mark.parametrize(("precision", "size"), [("float32", 64), ("bfloat16", 12)])
def test_a_gpu_has_one_kernel(precision: str, size: int) -> None:
    check_kernel("cpu", precision, size)
    check_kernel("cuda", "bfloat16", 64)
    with pytest.raises(ConfigError):
        check_kernel("cuda", precision, size)
