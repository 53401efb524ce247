"""`resume="never"` moves a run of ours aside, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ray.train import RunConfig

from checkpointing import CheckpointConfig
from elastic import ConfigError
from elastic.driver.resume import run_directory
from elastic.protocol.run_identity import identify, record_identity
from elastic.protocol.run_paths import RunPaths


def begin_anew(root: Path, claim: Callable[[RunPaths], None] = lambda paths: None) -> None:
    """What a start with `resume="never"` does first."""
    run_config = RunConfig(name=root.name, storage_path=str(root.parent))
    with run_directory(run_config, CheckpointConfig(resume="never"), claim):
        pass


def content(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in folder.rglob("*")
        if file.is_file()
    }


def a_source_tree(root: Path) -> None:
    (root / "package").mkdir(parents=True)
    (root / "package" / "main.py").write_text("print()")


def with_another_run_json(root: Path) -> None:
    root.mkdir()
    (root / "run.json").write_text('{"command": "make"}')


def with_checkpoints_of_others(root: Path) -> None:
    (root / "checkpoints" / "m").mkdir(parents=True)
    (root / "checkpoints" / "m" / "model.json").write_text("{}")


@pytest.mark.parametrize("fill", [a_source_tree, with_another_run_json, with_checkpoints_of_others])
def test_a_directory_that_is_no_run_stays(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    root = tmp_path / "src"
    fill(root)
    before = content(root)
    claimed: list[RunPaths] = []  # which starts a cluster
    with pytest.raises(
        ConfigError, match=rf"run_config\.name = 'src': .*{root} is no run"
    ) as caught:
        begin_anew(root, claimed.append)
    assert "\n" not in str(caught.value) and not claimed
    assert content(root) == before and not list(tmp_path.glob("src.before-*"))


def test_a_file_of_this_name_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        begin_anew(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_started_run_is_moved(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path / "run")
    record_identity(paths, identify(paths))
    before = content(paths.root)
    begin_anew(paths.root)
    (aside,) = tmp_path.glob("run.before-*")
    assert content(aside) == before and content(paths.root) == {}


def test_imported_checkpoints_are_moved(tmp_path: Path) -> None:
    """They have no run yet."""
    record = tmp_path / "run" / "checkpoints" / "m" / f"{7:012}.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    begin_anew(tmp_path / "run")
    assert len(list(tmp_path.glob("run.before-*"))) == 1


def test_what_a_refused_start_has_left_is_no_run(tmp_path: Path) -> None:
    begin_anew(tmp_path / "run")
    begin_anew(tmp_path / "run")
    assert not list(tmp_path.glob("run.before-*"))
