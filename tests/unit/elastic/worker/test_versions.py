"""What a worker says of its versions."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.protocol import versions as own
from elastic.protocol.run_paths import RunPaths
from elastic.worker.versions import find_versions
from tests.support.run_plan import run_plan
from trainer.te.config import TransformerEngine


def test_a_worker_tells_what_its_bits_depend_on(tmp_path: Path) -> None:
    """Transformer Engine, which no test has, where the run uses it."""
    no_coordinator: Any = None
    job = run_plan(RunPaths(root=tmp_path / "run"), no_coordinator).job
    found = find_versions(job)
    assert dict(found) == {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "elastictrainer": own.own_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    hash(found)  # they are counted
    train = replace(job.train, converters=(TransformerEngine(),), precision="bfloat16")
    assert dict(find_versions(replace(job, train=train))).keys() - dict(found) == {
        "transformer-engine"
    }


def test_the_own_version_is_of_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation says nothing of what a job brings along, which goes before it."""
    info = tmp_path / "elastictrainer-9.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elastictrainer\nVersion: 9.8\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert own.own_version() == "from source"
    monkeypatch.setattr(own, "__file__", str(tmp_path / "elastic/protocol/versions.py"))
    assert own.own_version() == "9.8"
