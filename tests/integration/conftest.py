"""One real Ray cluster for all integration tests, and the text they learn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from tiny import write_text

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local cluster with room for the largest layout of these tests; its workers can import
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        ray.init(num_cpus=12, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
