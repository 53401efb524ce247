"""Whole segments in bulk: there and back, and nothing left where it does not come to an end."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import traceback
from pathlib import Path

import boto3
import pytest

from checkpointing import (
    CorruptError,
    MissingError,
    S3Config,
    Store,
    StoreError,
    StoreUnavailableError,
)
from checkpointing.stores.s3 import s5cmd
from checkpointing.stores.s3.s5cmd import decide_error, read_outcome
from tests.support.fakes.s3_faults import FaultServer

SMALL = "d/3f/r00003/000000000010-1-0/it's a *.safetensors"
LARGE = "d/4e/r00002/000000000010-1-0/00000.safetensors"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for key, size in ((SMALL, 1000), (LARGE, (6 << 20) + 1)):
        path = tmp_path / "files" / key
        path.parent.mkdir(parents=True)
        path.write_bytes(os.urandom(size))
    return tmp_path / "files"


def processes() -> dict[int, str]:
    """Every s5cmd that this program has started: its command line by its id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
            if int(rest.split()[1]) == os.getpid() and name.endswith("(s5cmd"):
                found[int(stat.parent.name)] = stat.with_name("cmdline").read_text()
        except OSError:
            continue  # it has ended
    return found


def test_there_and_back(files: Path, config: S3Config, s3: Store, tmp_path: Path) -> None:
    s5cmd.push(config, files, [SMALL, LARGE])
    assert s3.list("") == sorted([SMALL, LARGE])
    assert s3.get(LARGE) == (files / LARGE).read_bytes()
    s5cmd.pull(config, tmp_path / "back", [LARGE, SMALL])
    for key in (SMALL, LARGE):
        assert (tmp_path / "back" / key).read_bytes() == (files / key).read_bytes()
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["d"]
    s5cmd.push(config, files, [])


def test_what_may_fail_once_is_repeated(files: Path, config: S3Config, faults: FaultServer) -> None:
    rules = [
        faults.inject("slow_down", kind="part"),
        faults.inject("reset", kind="part"),
        faults.inject("error", kind="put"),
    ]
    s5cmd.push(config, files, [SMALL, LARGE])
    assert [rule.fired for rule in rules] == [1, 1, 1]


def test_a_flip_on_the_way_is_refused(
    files: Path, config: S3Config, s3: Store, faults: FaultServer
) -> None:
    rule = faults.inject("flip_request", kind="put")
    with pytest.raises(CorruptError, match="bytes changed on their way"):
        s5cmd.push(config, files, [SMALL])
    assert rule.fired == 1 and s3.list("") == []


def test_encryption_goes_with_it(files: Path, config: S3Config, faults: FaultServer) -> None:
    kms = dataclasses.replace(config, encryption="aws:kms", kms_key_id="alias/ours")
    s5cmd.push(kms, files, [SMALL])
    (headers,) = faults.headers("put")
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/ours"


def test_killed_halfway_up_it_leaves_nothing(
    files: Path, config: S3Config, s3: Store, faults: FaultServer
) -> None:
    rule = faults.inject("delay", kind="part", times=None)
    seen: dict[int, str] = {}

    def kill() -> None:
        rule.entered.wait(60)
        seen.update(processes())
        for process in seen:
            os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(StoreUnavailableError, match=r"r00002.*ended with status -9"):
        s5cmd.push(config, files, [LARGE, SMALL], timeout_s=60)
    killer.join()
    (command,) = seen.values()
    assert "testing" not in command and "the-secret-key" not in command
    assert processes() == {}
    client = boto3.client("s3", endpoint_url=config.endpoint_url)
    uploads = client.list_multipart_uploads(Bucket=config.bucket, Prefix=config.prefix)
    assert "Uploads" not in uploads and s3.list("") == []


def test_out_of_time_halfway_down_it_changes_no_file(
    files: Path, config: S3Config, s3: Store, faults: FaultServer, tmp_path: Path
) -> None:
    for key in (SMALL, LARGE):
        s3.put(key, [(files / key).read_bytes()])
    (tmp_path / "back" / SMALL).parent.mkdir(parents=True)
    (tmp_path / "back" / SMALL).write_bytes(b"as it was")
    rule = faults.inject("trickle", kind="get", prefix=config.prefix + LARGE, times=None)
    with pytest.raises(StoreUnavailableError, match=r"\d of 2 files.*raise timeout_s"):
        s5cmd.pull(config, tmp_path / "back", [SMALL, LARGE], timeout_s=3.0)
    assert rule.fired > 0 and processes() == {}
    left = [path for path in (tmp_path / "back").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in left] == [b"as it was"]


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", "access denied.*iam-policy"),
        (400, "ExpiredToken", "credentials have expired"),
        (404, "NoSuchBucket", "no such bucket"),
    ],
)
def test_refusals_are_those_of_the_store(
    status: int, code: str, message: str, files: Path, config: S3Config, faults: FaultServer
) -> None:
    faults.inject("error", kind="put", status=status, code=code, times=None)
    with pytest.raises(StoreUnavailableError, match=message) as caught:
        s5cmd.push(config, files, [SMALL])
    assert "rank 3" in str(caught.value)
    assert "the-secret-key" not in str(caught.value)


SETTINGS = """[profile over]
sso_start_url = https://nobody/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = any

[profile broken]
credential_process = echo the-secret-key, and no JSON
"""


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("nobodys", r"check S3Config, the environment and ~/\.aws .*ProfileNotFound"),
        ("over", "credentials have expired; renew them"),
        ("broken", "the credentials could not be fetched; renew them"),
    ],
)
def test_credentials_that_cannot_be_had_are_an_error_of_the_store(
    profile: str, message: str, files: Path, config: S3Config, tmp_path: Path
) -> None:
    """boto3 says so before anything is sent, in errors of its own, which may quote a secret."""
    own = dataclasses.replace(config, part_timeout_s=7.4)  # a client that no other test has made
    (tmp_path / "config").write_text(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        patch.setenv("AWS_PROFILE", profile)
        for transfer in (s5cmd.push, s5cmd.pull):
            with pytest.raises(StoreUnavailableError, match=message) as caught:
                transfer(own, files, [SMALL])
            shown = "".join(traceback.format_exception(caught.value))
            assert config.url in shown and "the-secret-key" not in shown


def test_what_is_missing_is_named(files: Path, config: S3Config, s3: Store, tmp_path: Path) -> None:
    s3.put(SMALL, [b"."])
    with pytest.raises(MissingError, match="d/none"):
        s5cmd.pull(config, tmp_path / "back", [SMALL, "d/none"])
    with pytest.raises(StoreError, match="d/none is not a file"):
        s5cmd.push(config, files, ["d/none"])
    with pytest.raises(StoreError, match="not a key"):
        s5cmd.pull(config, tmp_path / "back", ["../up"])
    assert list((tmp_path / "back").iterdir()) == []


def test_its_output_is_read_line_by_line() -> None:
    outcome = read_outcome(
        [
            '{"operation":"cp","success":true,"source":"/a","destination":"s3://b/a"}',
            '{"operation":"cp","command":"cp /c s3://b/c","error":"SlowDown: status code: 503"}',
            "panic: not JSON",
        ]
    )
    assert outcome.done == {"s3://b/a"}
    assert outcome.error == "cp /c s3://b/c: SlowDown: status code: 503"
    assert read_outcome([]).error is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("cp x: NoSuchKey: The specified key does not exist. status code: 404, id: 1", "NoSuchKey"),
        ("cp x: NotFound: Not Found status code: 404, request id: , host id: ", "NoSuchKey"),
        ("MultipartUpload: upload failed\ncaused by: SlowDown: no\n status code: 503", "SlowDown"),
        ("NoCredentialProviders: no valid providers in chain", "NoCredentials"),
        ("something else", "s5cmd"),
    ],
)
def test_its_errors_mean_what_s3_said(text: str, code: str) -> None:
    assert decide_error(text).code == code
