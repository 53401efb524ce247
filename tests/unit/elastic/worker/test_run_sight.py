from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing import S3Config
from elastic.protocol.run_paths import RunPaths
from elastic.worker.run_sight import RunSight
from tests.support.watching import wait_until
from trainer.errors import ConfigError


def test_a_mount_that_comes_later_is_seen_and_none_is_told(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path / "run")
    sight = RunSight(paths)
    wait_until(lambda: not sight._sees, 10)
    with pytest.raises(ConfigError, match=r"run\.json is not there on machine"):
        sight.check()
    paths.root.mkdir()
    paths.identity.touch()
    sight.check()


def test_workers_whose_checkpoints_are_elsewhere_need_no_directory(tmp_path: Path) -> None:
    RunSight(RunPaths(root=tmp_path / "nowhere", store=S3Config(url="s3://bucket"))).check()
