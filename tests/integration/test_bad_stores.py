"""A run on a store that cannot be used: where that shows at the start, one clear error before
anything starts; a disk that fills later costs the saves, not the training."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing import (
    CheckpointConfig,
    Keys,
    S3Config,
    list_steps,
    open_store,
    verify_checkpoint,
)
from checkpointing.stores.s3 import pace
from elastic import ConfigError, RunFailedError
from tests.support.fakes.s3_faults import FaultServer
from tests.support.fakes.s3_server import BUCKET, CREDENTIALS, REGION, faulty_s3_server
from tests.support.gated_run import HALF, STEPS, gated_trainer, saved_weights
from tests.support.small_disk import fill, small_disk
from tests.support.watching import events_of, steps_of, wait_until

SKEWED = {
    "status": 403,
    "code": "RequestTimeTooSkewed",
    "headers": {"Date": "Fri, 20 Nov 2020 10:00:00 GMT"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with faulty_s3_server() as faults:
        yield faults


@pytest.fixture
def config(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Config]:
    monkeypatch.setattr(pace, "SHARED", tmp_path)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    yield S3Config(url=url, endpoint_url=server.url, timeout_s=20)
    server.clear()


def refuse_to_start(config: S3Config, tmp_path: Path, match: str) -> str:
    """The one error of a run that has left nothing behind."""
    checkpoint = CheckpointConfig(store=config)
    with pytest.raises(ConfigError, match=match) as caught:
        gated_trainer(str(tmp_path), str(tmp_path / "gate"), 1, checkpoint=checkpoint).fit()
    assert not (tmp_path / "gated").exists()
    assert "\n" not in str(caught.value)
    assert (
        CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in f"{caught.value!r} {caught.value.__cause__!r}"
    )
    return str(caught.value)


def answering(code: str, status: int, **more: Any) -> dict[str, Any]:
    return {"status": status, "code": code, **more}


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "access denied": (answering("AccessDenied", 403), "access denied; .*iam-policy.json"),
    "expired": (answering("ExpiredToken", 400), "credentials have expired; renew them"),
    "unknown key": (answering("InvalidAccessKeyId", 403), "access key is not known there; renew"),
    "wrong secret": (answering("SignatureDoesNotMatch", 403), "secret key does not fit .*; renew"),
    "clock skew": (SKEWED, r"clock is off by \+\d{8,} s; synchronise it"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_s3_refuses(case: str, config: S3Config, server: FaultServer, tmp_path: Path) -> None:
    """HEAD, the first request, is refused without a reason; the error has it all the same."""
    settings, message = REFUSALS[case]
    server.inject("error", times=None, **settings)
    said = refuse_to_start(config, tmp_path, rf"checkpoint\.store = 's3://.*/gated': .*{message}")
    assert f"{config.url}/gated: " in said and settings["code"] in said


def test_a_bucket_that_is_not_there(config: S3Config, tmp_path: Path) -> None:
    missing = dataclasses.replace(config, url="s3://nobodys-bucket/x")
    refuse_to_start(missing, tmp_path, "nobodys-bucket.*no such bucket; correct checkpoint.store")


def test_a_bucket_in_another_region(config: S3Config, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(config, region="eu-west-1")
    refuse_to_start(elsewhere, tmp_path, f"is in {REGION}, .*; set S3Config.region='{REGION}'")


def test_a_server_that_is_not_there(config: S3Config, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        nowhere = dataclasses.replace(config, endpoint_url=endpoint, timeout_s=0.5)
        refuse_to_start(nowhere, tmp_path, "cannot be reached; check S3Config.endpoint_url")


@pytest.mark.parametrize(
    "damage", [lambda record: record[: len(record) // 2], lambda record: b'{"schema": 99}']
)
def test_no_record_can_be_read(
    damage: Callable[[bytes], bytes], config: S3Config, tmp_path: Path
) -> None:
    """A truncated one, and one of a later version."""
    key = Keys().commit(6)
    open_store(config.below("gated")).put(key, [damage(b'{"sha256": "0", "step": 6}')])
    checkpoint = CheckpointConfig(store=config)
    with pytest.raises(ConfigError, match=rf"no checkpoint in s3://.*can be read; .*{key}.*Repair"):
        gated_trainer(str(tmp_path), str(tmp_path / "gate"), 1, checkpoint=checkpoint).fit()
    assert not (tmp_path / "gated" / "events.jsonl").exists()


# -- a disk that fills while the run goes on -------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run whose checkpoints have a small disk of their own."""
    checkpoints = tmp_path / "small" / "gated" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with small_disk(checkpoints, 512 << 10):
        yield checkpoints.parent


class Filler(threading.Thread):
    """Fills the disk of a run once the saves of its first half are over, and lets it go on; makes
    room again when a save has failed or the run is over."""

    def __init__(self, run: Path, gate: Path) -> None:
        super().__init__()
        self.run_, self.gate, self.over = run, gate, threading.Event()

    def failed(self) -> list[str]:
        """Why saves of the second half failed, and were not just passed over."""
        skipped = [e for e in events_of(self.run_, "checkpoint_skipped") if e["step"] > HALF]
        return [e["reason"] for e in skipped if "still being written" not in e["reason"]]

    def settled(self) -> bool:
        """Whether the saves of the first half are over: that of HALF waits for none before it."""
        saves = events_of(self.run_, "checkpoint_committed", "checkpoint_skipped")
        steps = [e["step"] for e in saves if e["kind"] == "checkpoint_committed"]
        return bool(steps) and HALF in [e["step"] for e in saves]

    def run(self) -> None:
        wait_until(self.settled)
        file = self.run_ / "checkpoints" / "filler"
        fill(file)
        self.gate.touch()
        wait_until(lambda: self.over.is_set() or self.failed())
        file.unlink()


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_fills(cluster: None, run: Path, tmp_path: Path) -> None:
    """A save fails, perhaps the last one too; the training comes to its end meanwhile, and the next
    start, if need be, writes what is missing."""
    often, gate = CheckpointConfig(every_steps=HALF // 2), tmp_path / "gate"
    filler = Filler(run, gate)
    filler.start()
    try:
        gated_trainer(str(run.parent), str(gate), 2, checkpoint=often).fit()
    except RunFailedError as error:
        assert "the last checkpoint could not be written" in str(error)
    finally:
        filler.over.set()
        filler.join()
    assert steps_of(run) == STEPS, "the training went on"
    assert not events_of(filler.run_, "worker_lost")
    reason = filler.failed()[0]
    assert f"{run}/checkpoints/" in reason and "No space left on device; free space" in reason
    assert f"(errno {errno.ENOSPC})" in reason
    store = open_store(run / "checkpoints")
    steps = list_steps(store, Keys())
    assert steps[0] <= HALF, "the newest one from before stays"
    assert all(verify_checkpoint(store, Keys(), step).findings == () for step in steps)

    gated_trainer(str(run.parent), str(gate), 2, checkpoint=often).fit()
    gated_trainer(str(tmp_path), str(gate), 1).fit()
    weights = saved_weights(run / "checkpoints")
    assert weights == saved_weights(tmp_path / "gated" / "checkpoints")
