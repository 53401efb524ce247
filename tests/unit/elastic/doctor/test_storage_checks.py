"""Rights and speed where runs write: a real directory, a real S3 server, and one that refuses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from checkpointing import open_store
from checkpointing.stores.s3 import pace
from elastic.doctor.bounded import Outcome
from elastic.doctor.loads import disk
from elastic.doctor.loads.store import try_store
from elastic.doctor.machine import this_machine
from elastic.doctor.storage_checks import (
    RIGHTS,
    check_folders,
    check_store,
    judge_folders,
    judge_store,
)
from tests.support.fakes.s3_server import BUCKET, s3_server

LARGE_BYTES = 34 << 20  # two parts


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", url)
        patch.setattr(pace, "SHARED", tmp_path_factory.mktemp("pace"))
        yield url


def keys_left(endpoint: str) -> list[str]:
    client = boto3.client("s3", endpoint_url=endpoint)
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return [
        *(one["Key"] for one in client.list_objects_v2(Bucket=BUCKET).get("Contents", [])),
        *(one["Key"] for one in uploads),
    ]


def test_a_store_with_all_rights(endpoint: str) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    finding = check_store(url, this_machine({}, ()))
    assert finding.check == f"store {url}" and finding.result.startswith("all rights, write ")
    assert keys_left(endpoint) == [], "it leaves nothing"


def test_a_bucket_that_is_not_there_fails_in_words(endpoint: str) -> None:
    found = try_store(open_store(f"s3://no-such-bucket/{uuid.uuid4().hex}"), LARGE_BYTES)
    finding = judge_store("s3://no-such-bucket/x", Outcome(found=found))
    assert finding.severity == "RESET" and "put: " in finding.result
    assert "s3:ListBucket" in finding.fix and "s3:DeleteObject" in finding.fix


class Refusing:
    """A directory's store in which one operation is not allowed."""

    def __init__(self, folder: Path, forbidden: str) -> None:
        self._store, self._forbidden = open_store(folder), forbidden

    def __getattr__(self, name: str) -> object:
        if name == self._forbidden:
            from checkpointing import StoreUnavailableError

            def refuse(*_: object) -> None:
                raise StoreUnavailableError("here", 13, "AccessDenied")

            return refuse
        return getattr(self._store, name)


@pytest.mark.parametrize(
    ("forbidden", "failed"),
    [
        ("put", {"put", "put in parts", "put if absent"}),
        ("put_if_absent", {"put if absent"}),
        ("get", {"get"}),
        ("list", {"list"}),
        ("abort_unfinished", {"list unfinished uploads"}),
        ("delete_many", {"delete"}),
    ],
)
def test_what_is_not_allowed_is_named(forbidden: str, failed: set[str], tmp_path: Path) -> None:
    found = try_store(Refusing(tmp_path, forbidden), 1 << 20)  # type: ignore[arg-type]
    assert set(found["failed"]) == failed
    assert failed <= RIGHTS.keys()
    finding = judge_store("s3://b/p", Outcome(found=found))
    assert finding.severity == "RESET" and all(name in finding.result for name in failed)


def test_a_slow_store_is_told_of() -> None:
    slow = Outcome(found={"failed": {}, "write": 19e6, "read": 90e6})
    assert judge_store("s3://b/p", slow).severity == "MONITOR"
    gone = Outcome(found={}, trouble="no answer in 90 s", late=True)
    assert judge_store("s3://b/p", gone).severity == "RESET"


def test_folders(tmp_path: Path) -> None:
    finding = check_folders(this_machine({}, (tmp_path,)))
    assert finding.result.startswith(f"{tmp_path}: write ") and list(tmp_path.iterdir()) == []
    missing = tmp_path / "not/yet"
    finding = check_folders(this_machine({}, (missing,)))
    assert finding.result.startswith(f"{missing}: write ") and list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    finding = check_folders(this_machine({}, (tmp_path / "file",)))
    assert finding.severity == "RESET" and "Not a directory" in finding.result
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    finding = check_folders(this_machine({}, (tmp_path / "link",)))
    assert finding.severity == "RESET" and "link is a link to nowhere" in finding.result


def test_a_disk_that_brings_back_something_else(tmp_path: Path) -> None:
    numbers = disk.measure(tmp_path, 1 << 20)
    assert numbers["wrong"] == 0
    bent = Outcome(found={**numbers, "wrong": 1})
    assert judge_folders({"/data": bent}).severity == "ISOLATE"
    slow = Outcome(found={**numbers, "write": 49e6})
    assert judge_folders({"/data": slow}).severity == "MONITOR"
