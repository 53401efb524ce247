"""Every fault that S3 and the way to it have: what is tried again, and what is said."""

from __future__ import annotations

import dataclasses
import itertools
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as boto

from checkpointing import (
    Attempt,
    CorruptError,
    Keys,
    MissingError,
    S3Config,
    Store,
    StoreError,
    StoreUnavailableError,
    TensorSlice,
    open_store,
    write_shared,
)
from checkpointing.stores.s3.errors import read_failure
from checkpointing.stores.s3.pace import shared_file, shared_pacer
from tests.support.fakes.s3_faults import FaultServer, Kind
from tests.support.fakes.s3_server import forget_pace, open_uploads

MIB = 1 << 20
LARGE = b"".join(bytes([n]) * MIB for n in range(6))  # two parts
SEGMENT = "d/3f/r00003/000000000010-1-0/00000.safetensors"


# -- what is cured by trying again -----------------------------------------------------------------

CURABLE: dict[str, dict[str, Any]] = {
    "503 SlowDown": {"action": "slow_down"},
    "429": {"action": "error", "status": 429, "code": "TooManyRequests"},
    "KMS is throttled": {"action": "error", "status": 400, "code": "KMS.ThrottlingException"},
    "408": {"action": "error", "status": 408, "code": "SomethingNew"},
    "500": {"action": "error"},
    "409": {"action": "error", "status": 409, "code": "OperationAborted"},
    "reset": {"action": "reset"},
    "answer lost": {"action": "drop_after_body"},
    "flipped on the way there": {"action": "flip_request"},
}


@pytest.mark.parametrize("fault", CURABLE)
@pytest.mark.parametrize("kind", ["put", "part"])
def test_uploads_are_repeated(
    fault: str, kind: Kind, s3: Store, config: S3Config, faults: FaultServer
) -> None:
    data = LARGE if kind == "part" else b"small"
    rule = faults.inject(**CURABLE[fault], kind=kind, times=2)
    assert s3.put("d/x", [data]) == len(data)
    assert rule.fired == 2
    assert faults.count(kind) == (2 if kind == "part" else 1) + 2  # no more than what failed
    assert s3.get("d/x") == data
    assert open_uploads(config) == []


WITH_BODY = ["get", "list", "delete_many", "create"]


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        *itertools.product(
            ["slow_down", "error", "reset", "drop_after_body"], [*WITH_BODY, "head", "delete"]
        ),
        *itertools.product(["truncate"], WITH_BODY),
    ],
)
def test_all_else_is_repeated(action: Any, kind: Any, s3: Store, faults: FaultServer) -> None:
    s3.put("d/x", [b"a small one"])
    faults.clear()
    rule = faults.inject(action, kind=kind)
    calls: dict[str, tuple[Callable[[], object], object]] = {
        "get": (lambda: s3.get_range("d/x", 2, 5), b"small"),
        "head": (lambda: s3.size("d/x"), 11),
        "list": (lambda: s3.list("d/"), ["d/x"]),
        "delete": (lambda: s3.delete("d/x"), None),
        "delete_many": (lambda: s3.delete_many(["d/x", "d/y"]), None),
        "create": (lambda: s3.put("d/y", [LARGE]), len(LARGE)),
    }
    call, answer = calls[kind]
    assert call() == answer
    assert rule.fired == 1
    assert faults.count(kind) == 2


@pytest.mark.parametrize("status", [408, 429])
def test_an_answer_without_a_body_is_told_by_its_status(
    status: int, s3: Store, faults: FaultServer
) -> None:
    s3.put("d/x", [b"."])
    rule = faults.inject("error", kind="head", status=status)
    assert s3.size("d/x") == 1
    assert rule.fired == 1


@pytest.mark.parametrize("action", ["error_in_200", "slow_down", "reset", "drop_after_body"])
def test_completion_is_repeated(
    action: Any, s3: Store, config: S3Config, faults: FaultServer
) -> None:
    rule = faults.inject(action, kind="complete")
    assert s3.put("d/x", [LARGE]) == len(LARGE)
    assert rule.fired == 1 and faults.count("complete") == 2
    assert faults.count("part") == 2  # nothing is sent twice for it
    assert s3.get("d/x") == LARGE
    assert open_uploads(config) == []


def test_completed_by_a_try_whose_answer_was_lost(s3: Store, faults: FaultServer) -> None:
    lost = faults.inject("drop_after_body", kind="complete")
    gone = faults.inject("error", kind="complete", status=404, code="NoSuchUpload")
    assert s3.put("d/x", [LARGE]) == len(LARGE)
    assert lost.fired == gone.fired == 1
    assert s3.get("d/x") == LARGE


def test_an_upload_that_somebody_aborted_is_not_taken_for_done(
    s3: Store, faults: FaultServer
) -> None:
    s3.put("d/x", [b"of another upload"])
    faults.inject("error", kind="complete", status=404, code="NoSuchUpload")
    with pytest.raises(StoreUnavailableError, match=r"d/x: .*aborted this upload"):
        s3.put("d/x", [LARGE])


def test_an_object_of_too_many_parts(
    s3: Store, config: S3Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpointing.stores.s3.upload.MAX_PARTS", 1)
    with pytest.raises(StoreError, match=r"d/x: more than 1 parts of 5242880 .*raise S3Config"):
        s3.put("d/x", [LARGE])
    assert open_uploads(config) == []


def test_a_segment_of_too_many_parts_is_refused_before_its_first_byte(
    config: S3Config, faults: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpointing.stores.s3.upload.MAX_PARTS", 1)
    part = TensorSlice("t", (len(LARGE),), "uint8", (0,), (len(LARGE),))
    with pytest.raises(StoreError, match=r"more than 1 parts of 5242880 .*segment_bytes"):
        write_shared(
            open_store(config),
            Keys(),
            Attempt(rank=0, step=1, generation=0),
            [part],
            memoryview(LARGE),
        )
    assert faults.requests == []


# -- the conditional write -------------------------------------------------------------------------


def test_commit_whose_answer_was_lost_is_known_again(s3: Store, faults: FaultServer) -> None:
    rule = faults.inject("drop_after_body", kind="put")
    assert s3.put_if_absent("m/1.json", b"mine") is True
    assert rule.fired == 1 and faults.count("put", status=412) == 1
    assert s3.get("m/1.json") == b"mine"


def test_somebody_elses_commit_is_not_taken_for_ours(s3: Store, faults: FaultServer) -> None:
    assert s3.put_if_absent("m/1.json", b"the same")
    faults.inject("reset", kind="put")
    assert s3.put_if_absent("m/1.json", b"the same") is False


def test_conflict_of_two_commits_is_tried_again(s3: Store, faults: FaultServer) -> None:
    rule = faults.inject(
        "error", kind="put", status=409, code="ConditionalRequestConflict", times=3
    )
    assert s3.put_if_absent("m/1.json", b"mine")
    assert rule.fired == 3 and faults.count("put") == 4


# -- damage ----------------------------------------------------------------------------------------


def test_a_flip_in_a_whole_object_is_read_again(s3: Store, faults: FaultServer) -> None:
    s3.put("m/1.json", [b"a record"])
    rule = faults.inject("flip", kind="get")
    assert s3.get("m/1.json") == b"a record"
    assert rule.fired == 1 and faults.count("get") == 2


def test_lasting_damage_is_called_by_its_name(config: S3Config, faults: FaultServer) -> None:
    impatient = open_store(dataclasses.replace(config, timeout_s=0.5))
    impatient.put(SEGMENT, [b"12345678"])
    faults.inject("flip", kind="get", times=None)
    with pytest.raises(CorruptError, match=r"r00003.*rank 3: bytes changed on their way"):
        impatient.get(SEGMENT)
    faults.inject("flip_request", kind="put", times=None)
    with pytest.raises(CorruptError, match=r"rank 3: bytes changed on their way \[BadDigest; \d"):
        impatient.put(SEGMENT, [b"12345678"])


# -- time ------------------------------------------------------------------------------------------


def test_throttled_for_too_long(config: S3Config, faults: FaultServer) -> None:
    faults.inject("slow_down", kind="part", times=None)
    impatient = open_store(dataclasses.replace(config, timeout_s=1))
    began_s = time.monotonic()
    with pytest.raises(
        StoreUnavailableError, match=r"r00003.*rank 3: S3 asked to slow down.*timeout_s \[SlowDown"
    ):
        impatient.put(SEGMENT, [LARGE])
    assert time.monotonic() - began_s < 12
    assert faults.count("abort") == 1 and open_uploads(config) == []


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (429, "TooManyRequests"), (400, "KMS.ThrottlingException")],
)
def test_the_node_slows_down_together(
    status: int, code: str, config: S3Config, s3: Store, faults: FaultServer
) -> None:
    pacer = shared_pacer(shared_file(f"{config.endpoint_url} {config.bucket}"))
    before = pacer.pace.per_s
    rule = faults.inject("error", kind="put", status=status, code=code)
    s3.put("d/x", [b"."])
    assert rule.fired == 1
    assert 0.69 * before < pacer.pace.per_s < 0.8 * before


def test_a_prefix_that_takes_so_many_requests_gets_no_errors_back(
    s3: Store, faults: FaultServer
) -> None:
    faults.throttle(parts=5, per_s=5, burst=5)
    for number in range(10):
        s3.put(f"d/3f/r00003/{number}", [b"."])
    assert faults.count("put", status=503) > 0
    assert faults.count("put", status=200) == 10


@pytest.mark.parametrize("action", ["delay", "trickle"])
def test_a_server_that_stalls_is_asked_again(
    action: Any, config: S3Config, faults: FaultServer
) -> None:
    hasty = open_store(dataclasses.replace(config, part_timeout_s=0.5))
    hasty.put("d/x", [LARGE])
    rule = faults.inject(action, kind="get")
    assert hasty.get_range("d/x", 0, 4 * MIB) == LARGE[: 4 * MIB]
    assert rule.entered.is_set() and rule.fired == 1


KILLED = """
import sys
from checkpointing import S3Config, open_store
config = S3Config(url=sys.argv[1], endpoint_url=sys.argv[2], part_bytes=5 << 20)
open_store(config).put("d/x", [bytes(12 << 20)])
"""


def test_a_writer_killed_in_a_part_leaves_what_the_next_start_ends(
    s3: Store, config: S3Config, faults: FaultServer
) -> None:
    rule = faults.inject("delay", kind="part", times=None)
    command = [sys.executable, "-c", KILLED, config.url, faults.url]
    writer = subprocess.Popen(command)
    try:
        assert rule.entered.wait(60)
    finally:
        writer.kill()
        writer.wait()
        forget_pace(faults.url)
    assert open_uploads(config) == [config.prefix + "d/x"]
    assert s3.list("") == []
    assert s3.abort_unfinished() == ["d/x"]
    assert open_uploads(config) == []


# -- what trying again does not cure ---------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "access denied": ({"status": 403, "code": "AccessDenied"}, "access denied.*iam-policy.json"),
    "expired": ({"status": 400, "code": "ExpiredToken"}, "credentials have expired; renew"),
    "unknown key": ({"status": 403, "code": "InvalidAccessKeyId"}, "access key is not known"),
    "wrong secret": ({"status": 403, "code": "SignatureDoesNotMatch"}, "secret key does not fit"),
    "clock skew": (
        {
            "status": 403,
            "code": "RequestTimeTooSkewed",
            "headers": {"Date": "Fri, 20 Nov 2020 10:00:00 GMT"},
        },
        r"clock is off by \+\d{8,} s; synchronise",
    ),
    "wrong region": (
        {"status": 301, "code": "PermanentRedirect", "headers": {"x-amz-bucket-region": "eu-1"}},
        "the bucket is in eu-1; set S3Config.region='eu-1'",
    ),
    "no such bucket": ({"status": 404, "code": "NoSuchBucket"}, "no such bucket; correct"),
    "anything else": ({"status": 400, "code": "SomethingNew"}, "S3 refused .SomethingNew"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_key_and_the_next_knob(
    case: str, s3: Store, config: S3Config, faults: FaultServer
) -> None:
    settings, message = REFUSALS[case]
    rule = faults.inject("error", kind="put", times=None, **settings)
    with pytest.raises(StoreUnavailableError, match=message) as caught:
        s3.put(SEGMENT, [b"."])
    assert f"{config.url}/{SEGMENT}" in str(caught.value) and "rank 3" in str(caught.value)
    assert rule.fired <= 2  # boto3 itself tries another region once


def test_a_bucket_that_is_not_there(config: S3Config) -> None:
    store = open_store(dataclasses.replace(config, url="s3://nobodys-bucket/x"))
    calls: list[Callable[[], object]] = [
        lambda: store.put("d/x", [b"."]),
        lambda: store.get("d/x"),
        lambda: store.list(""),
        store.check_writable,
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"s3://nobodys-bucket/x.*no such"):
            call()


def test_nobody_listens(config: S3Config) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        store = open_store(dataclasses.replace(config, endpoint_url=endpoint, timeout_s=0.5))
        with pytest.raises(StoreUnavailableError, match=r"cannot be reached.*endpoint_url"):
            store.check_writable()


@pytest.mark.parametrize("accepts", [False, True], ids=["refused", "silent"])
def test_who_waits_for_a_dead_server_is_told(
    accepts: bool,
    config: S3Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("checkpointing.stores.s3.client._QUIET_S", 0.0)
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if accepts:
            dead.listen()  # the kernel takes the connection, and nobody answers
        endpoint = f"http://127.0.0.1:{dead.getsockname()[1]}"
        hasty = dataclasses.replace(
            config, endpoint_url=endpoint, timeout_s=5.0, part_timeout_s=1.1
        )
        with pytest.raises(StoreUnavailableError, match=r"tries in [0-9.]+ s"):
            open_store(hasty).list("m/")
    fact = "no answer in time" if accepts else "the server cannot be reached"
    assert re.search(rf"waiting for {config} for up to \d s more: {fact}", caplog.text)


def test_no_credentials_until_there_are_some(config: S3Config, faults: FaultServer) -> None:
    own = dataclasses.replace(config, part_timeout_s=7.9)  # a client that no other test has made
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        with pytest.raises(StoreUnavailableError, match=r"no AWS credentials; provide them \(env"):
            open_store(own).list("")
    assert faults.requests == []
    assert open_store(own).list("") == []


SSO_PROFILE = """[profile old]
sso_start_url = https://nobody/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = any
"""


def test_a_login_that_is_over_is_not_waited_for(
    config: S3Config, faults: FaultServer, tmp_path: Path
) -> None:
    """As one of `aws sso login`, whose token is not on this node any more."""
    (tmp_path / "config").write_text(SSO_PROFILE)
    # A client that no other test has made.
    own = dataclasses.replace(config, part_timeout_s=7.7, timeout_s=1.0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        patch.setenv("AWS_PROFILE", "old")
        with pytest.raises(StoreUnavailableError, match="credentials have expired; renew them"):
            open_store(own).list("")
    assert faults.requests == []
    assert open_store(own).list("") == []


def test_credentials_that_expire_here_are_as_those_that_s3_refuses(
    config: S3Config, faults: FaultServer
) -> None:
    """boto3 finds it before it asks, and says so by a bare RuntimeError."""
    own = dataclasses.replace(config, part_timeout_s=7.6)  # a client that no other test has made
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SESSION_TOKEN", "old")
        patch.setenv("AWS_CREDENTIAL_EXPIRATION", "2020-01-01T00:00:00Z")
        store = open_store(own)
        with pytest.raises(StoreUnavailableError, match="credentials have expired; renew them"):
            store.list("")
    assert faults.requests == []
    assert open_store(own).list("") == []


PROCESS = """#!{python}
import json, sys
from pathlib import Path
there = Path({there!r})
if there.exists() or {broken}:
    sys.exit(print("the-secret-key, and no JSON"))
there.touch()
known = {{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "SessionToken": "c"}}
print(json.dumps({{**known, "Expiration": "2020-01-01T00:00:00Z"}}))
"""


@pytest.mark.parametrize("broken", [True, False], ids=["at first", "later"])
def test_a_credential_process_that_prints_no_json(
    broken: bool, config: S3Config, faults: FaultServer, tmp_path: Path
) -> None:
    script = tmp_path / "process"
    script.write_text(
        PROCESS.format(python=sys.executable, there=str(tmp_path / "there"), broken=broken)
    )
    script.chmod(0o700)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {script}\n")
    # A client that no other test has made.
    own = dataclasses.replace(config, part_timeout_s=7.5 - broken, timeout_s=1.0)
    fact = "boto3 cannot be set up" if broken else "the credentials could not be fetched; renew"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        with pytest.raises(StoreUnavailableError, match=fact) as caught:
            open_store(own).list("")
        assert "the-secret-key" not in f"{caught.value} {caught.value.__context__!r}"
        script.unlink()
        with pytest.raises(StoreUnavailableError, match="FileNotFoundError"):
            open_store(own).list("")
    assert faults.requests == []


def test_a_login_that_amazon_has_ended_is_as_one_that_has_expired() -> None:
    failure = read_failure(boto.UnauthorizedSSOTokenError())
    assert (failure.answer, failure.code) == ("refused", "ExpiredToken")


@pytest.mark.parametrize(
    "error",
    [
        boto.ParamValidationError(report="Invalid bucket name"),
        boto.NoRegionError(),
        boto.ConfigNotFound(path="/nonexistent"),
        boto.InvalidConfigError(error_msg="no role_arn"),
        boto.UnknownCredentialError(name="Nobody"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_node_is_set_to_is_not_waited_for(error: boto.BotoCoreError) -> None:
    failure = read_failure(error)
    assert (failure.answer, failure.code) == ("refused", type(error).__name__)
    assert "check S3Config, the environment and ~/.aws" in failure.fact


@pytest.mark.parametrize(
    "error",
    [
        boto.CredentialRetrievalError(provider="p", error_msg="timed out"),
        boto.EndpointConnectionError(endpoint_url="https://nobody"),
        boto.ConnectionClosedError(endpoint_url="https://nobody"),
        boto.MetadataRetrievalError(error_msg="timed out"),
        OSError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_network_may_have_done_is_tried_again(error: Exception) -> None:
    assert read_failure(error).answer == "retry"


def test_credentials_that_expire_are_looked_for_anew_where_head_says_so(
    config: S3Config, faults: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of frozen parameters begins with HEADs, whose answers have no body, and so no code."""
    own = dataclasses.replace(config, part_timeout_s=7.8)  # a client that no other test has made
    open_store(own).put("d/x", [b"."])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    rule = faults.inject("error", kind="head", times=None, status=400, code="ExpiredToken")
    with pytest.raises(StoreUnavailableError, match=r"credentials that have expired; renew .*400"):
        open_store(own).size("d/x")
    rule.times = rule.fired
    assert open_store(own).size("d/x") == 1
    assert "Credential=renewed/" in faults.headers("head")[-1]["authorization"]


def test_keys_of_a_deletion_may_fail_for_themselves(s3: Store, faults: FaultServer) -> None:
    s3.put("d/x", [b"."])
    for code in ("InternalError", "SlowDown"):
        faults.inject("fail_keys", kind="delete_many", code=code)
    s3.delete_many(["d/x"])
    assert faults.count("delete_many") == 3 and s3.list("") == []
    faults.inject("fail_keys", kind="delete_many", code="AccessDenied")
    with pytest.raises(StoreUnavailableError, match=r"d/x: access denied"):
        s3.delete_many(["d/x"])


# -- the check at the start ------------------------------------------------------------------------


def test_check_finds_another_region(config: S3Config) -> None:
    store = open_store(dataclasses.replace(config, region="eu-west-1"))
    with pytest.raises(
        StoreError, match=r"bucket is in us-east-1, requests go to eu-west-1; set S3Config.region"
    ):
        store.check_writable()


def test_check_finds_a_server_without_conditional_writes(s3: Store, faults: FaultServer) -> None:
    faults.inject("ignore_condition", kind="put", times=None)
    with pytest.raises(StoreError, match="ignores If-None-Match"):
        s3.check_writable()
    assert s3.list("") == []


def test_check_needs_every_permission(s3: Store, faults: FaultServer) -> None:
    for kind in ("bucket", "put", "get", "list", "delete"):
        faults.clear()
        faults.inject("error", kind=kind, status=403, code="AccessDenied", times=None)
        with pytest.raises(StoreUnavailableError, match="access denied"):
            s3.check_writable()
        assert faults.count(kind, status=403) >= 1
    faults.clear()
    for key in s3.list(""):
        s3.delete(key)


# -- what goes over the wire -----------------------------------------------------------------------


def test_owner_and_encryption_go_with_the_requests(config: S3Config, faults: FaultServer) -> None:
    full = dataclasses.replace(
        config, encryption="aws:kms", kms_key_id="alias/ours", expected_owner="123456789012"
    )
    store = open_store(full)
    store.put("d/x", [b"small"])
    store.put("d/y", [LARGE])
    assert store.put_if_absent("m/1", b".")
    for kind in ("put", "create"):
        for headers in faults.headers(kind):
            assert headers["x-amz-server-side-encryption"] == "aws:kms"
            assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/ours"
    assert {h["x-amz-expected-bucket-owner"] for h in faults.headers()} == {"123456789012"}
    kinds: tuple[Kind, ...] = ("put", "part")
    for kind in kinds:
        assert all("x-amz-checksum-crc32" in headers for headers in faults.headers(kind))


def test_no_secret_in_any_error(s3: Store, faults: FaultServer) -> None:
    faults.inject("error", status=403, code="SignatureDoesNotMatch", times=None)
    with pytest.raises(StoreUnavailableError) as caught:
        s3.get("d/x")
    error: BaseException | None = caught.value
    assert error is not None and error.__cause__ is None and error.__suppress_context__
    assert "the-secret-key-of-the-tests" not in f"{error!r} {error} {error.__context__!r}"
    with pytest.raises(MissingError):
        faults.clear()
        s3.get("d/x")
