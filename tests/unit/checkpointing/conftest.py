"""An S3 server behind the fault server, and a store on it with a prefix of the test's own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing import S3Config, Store, open_store
from checkpointing.stores.s3 import pace
from tests.support.fakes.s3_faults import FaultServer
from tests.support.fakes.s3_server import BUCKET, s3_server


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str) -> Iterator[FaultServer]:
    with FaultServer(s3_endpoint) as server:
        yield server


@pytest.fixture
def faults(proxy: FaultServer) -> Iterator[FaultServer]:
    yield proxy
    proxy.clear()


@pytest.fixture
def config(faults: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Config:
    monkeypatch.setattr(pace, "SHARED", tmp_path)
    return S3Config(
        url=f"s3://{BUCKET}/{uuid.uuid4().hex}/run",
        endpoint_url=faults.url,
        part_bytes=5 << 20,
        timeout_s=20,
    )


@pytest.fixture
def s3(config: S3Config) -> Store:
    return open_store(config)
