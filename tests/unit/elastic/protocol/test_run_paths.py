from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from checkpointing import S3Config
from elastic.errors import RunGoesOnError
from elastic.exit_status import decide_exit_status
from elastic.protocol.run_paths import RunPaths, hold_run


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path / "run")


def fill(paths: RunPaths, text: str) -> None:
    (paths.root / "checkpoints").mkdir(parents=True)
    paths.events.write_text(text)


def test_everything_of_a_run_lies_in_its_directory(paths: RunPaths) -> None:
    inside = [paths.checkpoints, paths.events, paths.steps, paths.tensorboard]
    assert {Path(str(path)).parent for path in inside} == {paths.root}
    assert len(set(inside)) == len(inside)


def test_there_is_nothing_to_set_aside_at_first(paths: RunPaths) -> None:
    assert paths.set_aside() is None
    assert not paths.root.exists()


def test_an_earlier_run_is_moved_whole(paths: RunPaths) -> None:
    fill(paths, "first")
    target = paths.set_aside()
    assert target is not None and target.parent == paths.root.parent
    assert re.fullmatch(r"run\.before-\d{8}-\d{6}", target.name)
    assert not paths.root.exists()
    assert (target / "events.jsonl").read_text() == "first"
    assert (target / "checkpoints").is_dir()


def test_runs_set_aside_in_one_second_do_not_overwrite_each_other(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20261120-101500")
    names = []
    for text in ("first", "second", "third"):
        fill(paths, text)
        target = paths.set_aside()
        assert target is not None and (target / "events.jsonl").read_text() == text
        names.append(target.name)
    stem = "run.before-20261120-101500"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]
    assert sorted(path.name for path in paths.root.parent.iterdir()) == names


def test_a_run_that_is_held_can_be_started_again_later(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path / "run")
    with hold_run(paths), pytest.raises(RunGoesOnError, match="is locked") as refused:
        hold_run(paths)
    assert decide_exit_status(refused.value) == 1
    hold_run(paths).close()


def test_checkpoints_on_s3_are_all_that_lies_elsewhere(tmp_path: Path) -> None:
    store = S3Config(url="s3://bucket/base/run")
    paths = RunPaths(root=tmp_path / "run", store=store)
    assert paths.checkpoints == store and str(paths.checkpoints) == "s3://bucket/base/run"
    assert paths.events.parent == tmp_path / "run"
    assert paths.memory == RunPaths(root=tmp_path / "run").memory
