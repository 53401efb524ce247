"""`elastic checkpoints` on a run whose checkpoints lie on S3; boto3's environment says how to get
there."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointing import Reader, S3Config, Store, list_steps, load_manifest, open_store
from checkpointing.stores.s3 import pace
from checkpointing.stores.s3.client import _CONNECT_TIMEOUT_S
from elastic.cli import runs
from elastic.cli.main import main
from elastic.protocol.events import RunStarted
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import EventLog
from tests.support.fakes.s3_faults import FaultServer
from tests.support.fakes.s3_server import BUCKET, faulty_s3_server
from tests.support.tiny_checkpoint import (
    KEYS,
    STEP,
    Tiny,
    make_tiny,
    state_of,
    training_state,
    write_state,
)


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make_tiny()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    """A server whose buckets no host is named after."""
    with faulty_s3_server() as server, pytest.MonkeyPatch.context() as patch:
        named = server.url.replace("127.0.0.1", "localhost")
        patch.setenv("AWS_ENDPOINT_URL_S3", named)
        patch.setattr(pace, "SHARED", tmp_path_factory.mktemp("pace"))
        yield server


@pytest.fixture
def endpoint(server: FaultServer) -> str:
    return server.url


@pytest.fixture
def base(endpoint: str) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def url(base: str, tiny: Tiny) -> str:
    """A run that the command finds where a trainer with `CheckpointConfig(store=base)` puts it."""
    where = S3Config(url=base).below("run")
    write_state(open_store(where), state_of(tiny), state=training_state(tiny))
    return where.url


def add_step(url: str, step: int) -> Store:
    store = open_store(url)
    write_state(store, {"param/w": torch.arange(6.0)}, step=step)
    return store


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["checkpoints", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_looking(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = add_step(url, 8)
    assert ask(capsys, "verify", url, 8)[0] == 0
    rows = json.loads(ask(capsys, "list", url, "--json")[1])["checkpoints"]
    assert [(row["step"], row["verified_at"] is not None) for row in rows] == [
        (7, False),
        (8, True),
    ]
    assert f"step {STEP}, committed 20" in ask(capsys, "show", url, STEP)[1]
    key = min(load_manifest(store, KEYS, 8).segments)
    store.delete(key)
    status, out, err = ask(capsys, "verify", url, "newest")
    assert (status, err) == (1, f"elastic: {key}: missing: no such object\n")
    assert "1 checks failed" in out


def test_a_store_that_refuses_takes_no_note_back(
    url: str, server: FaultServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Credentials expire while an hour's verification runs: that says nothing of the bytes."""
    assert ask(capsys, "verify", url, STEP)[0] == 0
    data = url.removeprefix(f"s3://{BUCKET}/") + "/d/"
    refusal = server.inject(
        "error", kind="get", prefix=data, times=None, status=400, code="ExpiredToken"
    )
    status, _, err = ask(capsys, "verify", url, STEP)
    refusal.times = refusal.fired
    assert status == 1 and "unreachable" in err and "have expired" in err
    (row,) = json.loads(ask(capsys, "list", url, "--json")[1])["checkpoints"]
    assert row["verified_at"] is not None


def test_fates(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = add_step(url, 8)
    assert ask(capsys, "pin", url, 7)[:2] == (0, "step 7 is pinned\n")
    assert "it is pinned. Unpin it first" in ask(capsys, "delete", url, 7)[2]
    assert ask(capsys, "unpin", url, 7)[1] == "step 7 is no longer pinned\n"
    assert ask(capsys, "delete", url, 7)[:2] == (0, "step 7 is deleted\n")
    assert list_steps(store, KEYS) == [8]
    assert {KEYS.step_of(key) for key in store.list("")} == {8}


def test_out_and_in_again(
    base: str, url: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form, options in (("dcp", []), ("hf", ["--step", 7])):
        target, other = tmp_path / form, f"{base}/from-{form}"
        assert ask(capsys, "export", url, "newest", target, "--to", form)[0] == 0
        bring = ("import", other, target, "--from", form, *options)
        assert ask(capsys, *bring)[:2] == (0, f"step {STEP} is committed in {other}\n")
        store = open_store(other)  # where a run of this name looks for it, and not below that
        for name, tensor in state_of(tiny).items():
            if form == "dcp" or name.startswith("param/"):
                read = Reader(store, load_manifest(store, KEYS, STEP)).read_full(name)
                assert torch.equal(read, tensor)
        assert ask(capsys, "verify", other, "newest")[0] == 0
        status, _, err = ask(capsys, *bring)
        assert status == 2 and "step 7 is already committed" in err
        assert KEYS.claim(STEP) not in store.list("m/")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("s3://{bucket}/nowhere", "there are no checkpoints in it; name a run's directory or URL"),
        ("s3://nobodys-bucket/x", "there is no such bucket; correct checkpoint.store"),
        ("s3://No_Bucket/x", "not a bucket and a prefix. Write s3://BUCKET/PREFIX"),
    ],
)
def test_bad_input_is_one_line_and_2(
    endpoint: str, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name.format(bucket=BUCKET)
    status, out, err = ask(capsys, "list", name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert name in err and said in err and "nor in" not in err


def test_the_configurations_own_endpoint_comes_first(
    endpoint: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://localhost:9")
    assert open_store(S3Config(url=base, endpoint_url=endpoint)).list("") == []


def test_a_store_that_the_records_name_is_told_of_and_reached_as_by_the_run(
    url: str,
    server: FaultServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the endpoint and with the owner of its `S3Config`; earlier records have none. The
    environment's endpoint goes first: a port that is forwarded here, say."""
    settings = {"endpoint_url": server.url, "expected_owner": "123456789012", "later": "unknown"}
    told = f"elastic: by the run's records its checkpoints go to {url}"

    def ask_of(name: str, settings: dict[str, str]) -> tuple[int, str, str]:
        paths = RunPaths(root=tmp_path / name)
        started = RunStarted(
            time=1.0, name=name, layout={}, steps=9, start_step=0, versions={}, store=url,
            store_settings=settings,
        )  # fmt: skip
        with EventLog(paths.events) as log:
            log.append(started)
        return ask(capsys, "pin", paths.root, STEP)

    here = f"{told} at {os.environ['AWS_ENDPOINT_URL_S3']}\n"
    assert ask_of("earlier", {}) == (0, f"step {STEP} is pinned\n", here)
    dead = {**settings, "endpoint_url": "http://localhost:9"}
    monkeypatch.setattr(runs, "PATIENCE_S", 0.5)
    assert ask_of("forwarded", dead)[::2] == (0, here)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "")  # as of a template: there is none
    code, out, err = ask_of("gone", dead)
    assert code and not out and err.startswith(f"{told} at http://localhost:9\n")
    begun = len(server.headers())
    assert ask_of("run", settings)[::2] == (0, f"{told} at {server.url}\n")
    owners = [h.get("x-amz-expected-bucket-owner") for h in server.headers()[begun:]]
    assert owners and set(owners) == {"123456789012"}


def test_a_server_that_does_not_answer_is_given_up_soon(
    base: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the connection, and nobody answers."""
    assert runs.PATIENCE_S + _CONNECT_TIMEOUT_S + runs.TRY_S < 30
    monkeypatch.setattr(runs, "PATIENCE_S", 2.0)
    monkeypatch.setattr(runs, "TRY_S", 1.2)
    with socket.create_server(("127.0.0.1", 0)) as dead:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{dead.getsockname()[1]}")
        status, _, err = ask(capsys, "list", base)
    assert status == 2
    assert base in err and "no answer in time" in err
