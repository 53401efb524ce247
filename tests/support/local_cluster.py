"""A Ray cluster on this machine whose workers can import the tests, and what stands in for
libraries that they lack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

from tests.support import ROOT
from tests.support.te_stand_in import STAND_INS


@contextmanager
def local_cluster() -> Iterator[None]:
    """One machine with room for the largest layout of the tests and its spares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{STAND_INS}")
        ray.init("local", num_cpus=12, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
