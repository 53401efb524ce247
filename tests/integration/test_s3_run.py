"""A run whose checkpoints lie on S3, at 20 % of 503s: stopped at half, and gone on with from there
with another number of replicas, to the same weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from ray.train import RunConfig

from checkpointing import (
    CheckpointConfig,
    Keys,
    S3Config,
    open_store,
)
from elastic import ConfigError
from elastic.driver.resume import run_directory
from tests.support import ROOT
from tests.support.fakes.s3_faults import FaultServer
from tests.support.fakes.s3_server import BUCKET, faulty_s3_server
from tests.support.gated_run import HALF, gated_trainer, saved_weights
from tests.support.watching import stop_at_once

DEADLINE_S = 180.0
SEGMENT = re.compile(r"base/gated/d/[0-9a-f]{2}/r(\d{5})/(\d{12})-\d+-\d+/\d{5}\.safetensors")


@pytest.fixture
def faults() -> Iterator[FaultServer]:
    with faulty_s3_server() as server:
        yield server


@pytest.fixture
def config(faults: FaultServer) -> S3Config:
    return S3Config(url=f"s3://{BUCKET}/base", endpoint_url=faults.url, timeout_s=30)


def start(config: S3Config, storage: Path, replicas: int) -> subprocess.Popen[bytes]:
    arguments = [config.url, str(config.endpoint_url), str(storage), str(storage / "gate")]
    command = [sys.executable, "tests/support/s3_run.py", *arguments, str(replicas)]
    paths = str(ROOT)
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})


def keys_of(config: S3Config) -> list[str]:
    client = boto3.client("s3", endpoint_url=config.endpoint_url)
    return [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", ())]


@pytest.mark.slow
def test_stopped_and_gone_on_with_from_s3(
    config: S3Config, faults: FaultServer, cluster: None, tmp_path: Path
) -> None:
    rule = faults.inject("slow_down", times=None, chance=0.2)
    record = f"base/gated/m/{HALF:012}.json"
    process = start(config, tmp_path, 1)
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        while not faults.count("put", prefix=record, status=200):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        stop_at_once(process, tmp_path / "gated")
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    found = [SEGMENT.fullmatch(key) for key in keys_of(config)]
    assert {(m[1], m[2]) for m in found if m} == {(f"{r:05}", f"{HALF:012}") for r in (0, 1)}
    assert [k for k, m in zip(keys_of(config), found, strict=True) if not m] == [record]

    (tmp_path / "gate").touch()
    process = start(config, tmp_path, 2)
    try:
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert rule.fired > 0
    events = (tmp_path / "gated" / "events.jsonl").read_text().splitlines()
    starts = [json.loads(line)["start_step"] for line in events if '"run_started"' in line]
    assert starts == [0, HALF]
    assert not (tmp_path / "gated" / "checkpoints").exists()

    (tmp_path / "local").mkdir()
    gated_trainer(str(tmp_path / "local"), str(tmp_path / "gate"), 1, shard=2).fit()
    local = tmp_path / "local" / "gated" / "checkpoints"
    assert saved_weights(config.below("gated")) == saved_weights(local)


def test_a_store_that_cannot_be_used_is_named_before_anything_starts(
    config: S3Config, faults: FaultServer, tmp_path: Path
) -> None:
    run = RunConfig(name="gated", storage_path=str(tmp_path))
    store = open_store(config.below("gated"))
    client = boto3.client("s3", endpoint_url=config.endpoint_url)
    client.create_multipart_upload(Bucket=BUCKET, Key="base/gated/d/of-another-machine")
    with run_directory(run, CheckpointConfig(store=config)):
        pass  # it may still be refused, so it ends nothing
    assert store.list("") == []
    assert len(client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]) == 1
    store.put(Keys().commit(7), [b"a record"])
    with (
        pytest.raises(ConfigError, match=r"checkpoint\.resume = 'never': s3://.*up to step 7"),
        run_directory(run, CheckpointConfig(store=config, resume="never")),
    ):
        pass
    faults.inject("error", kind="put", status=403, code="AccessDenied", times=None)
    with (
        pytest.raises(ConfigError, match=r"checkpoint\.store = 's3://.*/gated': .*access denied"),
        run_directory(run, CheckpointConfig(store=config)),
    ):
        pass
    assert not (tmp_path / "gated").exists()
