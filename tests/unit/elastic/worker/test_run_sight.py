"""A worker whose machine does not see what the others read says so before it takes part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing import S3Config
from elastic.protocol.run_paths import RunPaths
from elastic.worker.run_sight import RunSight
from elastic.worker.worker import Worker
from tests.support.watching import wait_until
from trainer.errors import StorageNotSeenError
from trainer.tasks.causal_lm import PreparedCausalLM


def test_a_mount_that_comes_later_is_seen_and_none_is_told(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path / "run")
    sight = RunSight(paths)
    wait_until(lambda: not sight._sees, 10)
    with pytest.raises(StorageNotSeenError, match=r"run\.json is not there on machine"):
        sight.check()
    paths.root.mkdir()
    paths.identity.touch()
    sight.check()


def test_workers_whose_checkpoints_are_elsewhere_need_no_directory(tmp_path: Path) -> None:
    RunSight(RunPaths(root=tmp_path / "nowhere", store=S3Config(url="s3://bucket"))).check()


def test_tokens_that_are_not_seen_are_told_before_a_group_is_made(tmp_path: Path) -> None:
    """Also where checkpoints are in a store: else it would begin to heal, and disturb the others
    each time."""
    nowhere = str(tmp_path / "nowhere")
    task = PreparedCausalLM(
        config={}, seq_len=8, train_path=nowhere, eval_path=nowhere, pretrained=None, info={}
    )
    worker: Any = SimpleNamespace(
        run_sight=RunSight(RunPaths(root=tmp_path, store=S3Config(url="s3://bucket"))),
        job=SimpleNamespace(task=task),
    )
    answer: Any = None
    with pytest.raises(StorageNotSeenError, match="the tokens cannot be read on machine"):
        Worker.make_engine(worker, answer, None, bool)
