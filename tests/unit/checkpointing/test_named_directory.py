from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.named_directory import named_directory


@pytest.mark.parametrize(
    "name",
    ["store", "./store", "../here/store", "x/../store", "~/store", "{}/store", "{}//x/../store/.",
     "file://{}/store", "/{}/store"],
)  # fmt: skip
def test_a_directory_has_one_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    assert bytes(named_directory(name.format(here))) == bytes(here / "store")


def test_links_stay_unless_the_system_would_leave_them(tmp_path: Path) -> None:
    (tmp_path / "disk" / "data").mkdir(parents=True)
    (tmp_path / "disk" / "runs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "data")
    assert named_directory(tmp_path / "link" / "runs") == tmp_path / "link" / "runs"
    assert named_directory(tmp_path / "link" / "x" / "..") == tmp_path / "link"
    beside = tmp_path / "link" / ".." / "runs"
    assert beside.is_dir()
    assert named_directory(beside) == tmp_path.resolve() / "disk" / "runs"


def test_above_the_root_is_the_root() -> None:
    assert named_directory("/../../x") == Path("/x")
