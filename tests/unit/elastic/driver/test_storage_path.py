from __future__ import annotations

from pathlib import Path

import pytest
from ray.train import RunConfig

from checkpointing import CheckpointConfig
from elastic.driver.resume import local_path, run_directory, run_root
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("storage", "path"),
    [
        ("/data/runs", "/data/runs"),
        ("file:///data/runs", "/data/runs"),
        ("runs", "/here/runs"),
        ("~/runs", "/home/me/runs"),
        ("../data/./runs", "/data/runs"),
    ],
)
def test_other_processes_get_an_absolute_path(
    storage: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    run_config = RunConfig(name="x", storage_path=storage)
    assert local_path(run_config) == path
    assert run_root(run_config) == Path(path, "x")


def test_a_store_is_no_directory() -> None:
    with pytest.raises(
        ConfigError, match=r"run_config\.storage_path = 's3://bucket/x': this version"
    ):
        run_root(RunConfig(name="x", storage_path="s3://bucket/x"))


def test_a_password_in_a_store_s_url_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"storage_path = 's3://\.\.\.'") as caught:
        run_root(RunConfig(name="x", storage_path="s3://KEY:SECRET@bucket/x"))
    assert "SECRET" not in str(caught.value.args)


def test_a_file_of_the_run_s_name_is_told_of(tmp_path: Path) -> None:
    """A file in the storage path is that field's."""
    (tmp_path / "afile").touch()
    for name, path, field in (
        ("afile", tmp_path, "run_config.name"),
        ("x", tmp_path / "afile", "run_config.storage_path"),
    ):
        run_config = RunConfig(name=name, storage_path=str(path))
        with pytest.raises(ConfigError) as caught, run_directory(run_config, CheckpointConfig()):
            raise AssertionError("a file is no directory")
        assert caught.value.field == field
    assert not (tmp_path / ".afile.lock").exists()
