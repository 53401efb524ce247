"""What the packages are to those who install and import them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages
from setuptools.config.pyprojecttoml import read_configuration

from tests.support import ROOT

PACKAGES = ("elastic", "trainer", "checkpointing", "health")


def import_elastic(folder: Path) -> str:
    """What a script in `folder` that imports elastic prints on stderr."""
    script = folder / "script.py"
    script.write_text("import elastic")
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return run.stderr


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "elastic"])
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path: Path, package: str, form: str) -> None:
    file = tmp_path / form.format(package)
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    other = file if file.name != "__init__.py" else file.parent
    error = import_elastic(tmp_path).strip().splitlines()[-1]
    assert error == (
        f"ImportError: {other} hides ElasticTrainer's package {package!r} in {ROOT}: "
        f"Python finds it first. Rename {other.name}."
    )


def test_other_files_beside_the_script_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "trainers.py").write_text("")
    (tmp_path / "health").mkdir()  # a folder that is no package
    assert import_elastic(tmp_path) == ""


def test_annotations_and_all_folders_are_installed() -> None:
    settings = read_configuration(str(ROOT / "pyproject.toml"), expand=False)["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["*"]
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
    found = set(find_packages(str(ROOT), include=settings["packages"]["find"]["include"]))
    with_code = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    assert found == with_code
