"""A Ray cluster for the runs with many faults. It ends with its module: other tests have theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import local_cluster
from tiny import write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster():
        yield
