from __future__ import annotations

import math
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from checkpointing import CheckpointConfigError, S3Config, StoreUnavailableError, open_store
from checkpointing.stores.s3 import pace
from checkpointing.stores.s3.store import S3Store


def test_bucket_and_prefix() -> None:
    for url, prefix in [
        ("s3://our-bucket", ""),
        ("s3://our-bucket/", ""),
        ("s3://our-bucket/a", "a/"),
        ("s3://our-bucket/a/b c/", "a/b c/"),
    ]:
        config = S3Config(url=url)
        assert (config.bucket, config.prefix) == ("our-bucket", prefix)
        assert S3Config(url=str(config)).prefix == prefix
    assert str(S3Config(url="s3://our-bucket/a/").below("run")) == "s3://our-bucket/a/run"
    assert S3Config(url="s3://our-bucket", region="eu-1").below("run").region == "eu-1"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"url": "http://bucket/x"}, "url"),
        ({"url": "s3://"}, "url"),
        ({"url": "s3://UPPER/x"}, "url"),
        ({"url": "s3://key:hidden@bucket/x"}, "url"),
        ({"url": "s3://bucket//x"}, "url"),
        ({"url": "s3://bucket/../x"}, "url"),
        ({"url": "s3://bucket/x?versionId=1"}, "url"),
        ({"endpoint_url": "localhost:9000"}, "endpoint_url"),
        ({"endpoint_url": "http://user:hidden@host"}, "endpoint_url"),
        ({"encryption": "des"}, "encryption"),
        ({"kms_key_id": "alias/x"}, "kms_key_id"),
        ({"expected_owner": "1234"}, "expected_owner"),
        ({"part_bytes": 1 << 20}, "part_bytes"),
        ({"upload_threads": 0}, "upload_threads"),
        ({"part_timeout_s": 0}, "part_timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"part_timeout_s": math.nan}, "part_timeout_s"),
    ],
)
def test_refuses_what_cannot_work(given: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointConfigError) as caught:
        S3Config(**{"url": "s3://bucket/x", **given})
    assert caught.value.field == f"checkpoint.store.{field}"
    assert "hidden" not in str(caught.value) and "hidden" not in repr(caught.value)


def test_open_store_takes_urls_and_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pace, "SHARED", tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for where in ("s3://bucket/run", S3Config(url="s3://bucket/run")):
        store = open_store(where)
        assert isinstance(store, S3Store)
        assert (store.config.bucket, store.config.prefix) == ("bucket", "run/")
    with pytest.raises(CheckpointConfigError, match="s3://BUCKET/PREFIX"):
        open_store("s3:///run")


@pytest.mark.parametrize(
    ("variable", "value", "fact"),
    [
        ("AWS_PROFILE", "nobodys", "a profile that is not in ~/.aws"),
        ("AWS_ENDPOINT_URL", "user:hidden@minio:9000", "AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL"),
        ("AWS_DEFAULT_REGION", "no region", "AWS_DEFAULT_REGION"),
    ],
)
def test_an_environment_that_does_not_serve_is_an_error_of_the_store(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, fact: str
) -> None:
    monkeypatch.setenv(variable, value)
    config = S3Config(url="s3://bucket/run", part_timeout_s=len(variable))  # no client is kept yet
    with pytest.raises(StoreUnavailableError, match=fact) as caught:
        open_store(config)
    shown = "".join(traceback.format_exception(caught.value))
    assert "s3://bucket/run" in shown and "hidden" not in shown


def test_crosses_ray() -> None:
    config = S3Config(url="s3://bucket/x", encryption="aws:kms", kms_key_id="alias/x")
    assert pickle.loads(pickle.dumps(config)) == config


def test_nobody_pays_for_boto3_who_does_not_use_it() -> None:
    code = (
        "import sys, checkpointing; checkpointing.S3Config(url='s3://bucket/x');"
        "checkpointing.open_store('/tmp/x'); sys.exit('boto3' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
