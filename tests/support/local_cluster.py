"""A Ray cluster on this machine whose workers can import the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

from tests.support import ROOT


@contextmanager
def local_cluster() -> Iterator[None]:
    """One machine with room for the largest layout of the tests and its spares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init("local", num_cpus=12, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
