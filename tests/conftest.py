"""What the tests share: the same random numbers each time, one Ray cluster, the text that runs
learn; and no GPU tests without a GPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair.
settings.register_profile("here", deadline=None)
settings.load_profile("here")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Seed the generators that are loaded; importing torch for a test without it costs seconds."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One real Ray cluster for all runs; tests without a run do not wait for Ray's import."""
    from tests.support.local_cluster import local_cluster

    with local_cluster():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny import write_text

    return write_text(tmp_path_factory.mktemp("text"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
