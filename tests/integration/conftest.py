"""One real Ray cluster for all integration tests, and the text they learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import local_cluster
from tiny import write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    with local_cluster():
        yield
