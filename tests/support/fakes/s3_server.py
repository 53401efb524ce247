"""A plain S3 server on this machine (moto, over real HTTP), and what programs need to reach it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import boto3
import pytest
from moto.server import ThreadedMotoServer

from checkpointing import S3Config
from checkpointing.stores.s3.pace import shared_file
from tests.support.fakes.s3_faults import FaultServer

BUCKET = "checkpoints"
REGION = "us-east-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "the-secret-key-of-the-tests",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_DEFAULT_REGION": REGION,
}


@contextmanager
def s3_server() -> Iterator[str]:
    """Runs a server with one empty bucket, and sets credentials. Yields its endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        try:
            boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
            yield endpoint
        finally:
            # What it holds belongs to the process, not to the server.
            urlopen(Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=10).close()
            server.stop()


@contextmanager
def faulty_s3_server() -> Iterator[FaultServer]:
    """The same behind a server that makes mistakes where it is told to."""
    with s3_server() as endpoint, FaultServer(endpoint) as faults:
        yield faults
        forget_pace(faults.url)


def open_uploads(config: S3Config) -> list[str]:
    """Keys of the multipart uploads below the prefix that are neither complete nor aborted."""
    client = boto3.client("s3", endpoint_url=config.endpoint_url)
    answer = client.list_multipart_uploads(Bucket=config.bucket, Prefix=config.prefix)
    return [entry["Key"] for entry in answer.get("Uploads", ())]


def forget_pace(endpoint: str) -> None:
    """Removes what other processes of a test have left in this machine's memory about a server."""
    file = shared_file(f"{endpoint} {BUCKET}", Path("/dev/shm"))
    file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others have theirs there
        file.parent.rmdir()
