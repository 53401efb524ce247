"""What every test needs: the same random numbers each time, and no GPU tests without a GPU."""

from __future__ import annotations

import random
import sys

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
