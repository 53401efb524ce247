"""A Ray cluster for the runs with many faults. It ends with its module: other tests have theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from tiny import write_text

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One machine with room for the largest layout and its spares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        ray.init(num_cpus=12, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
