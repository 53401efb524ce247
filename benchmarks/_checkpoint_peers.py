"""The peers: torch's DCP through fsspec and through s3torchconnector, boto3 and s5cmd alone.

The libraries that are not ours to depend on go to a directory of their own: s3fs wants an older
botocore than boto3 does, so an extra that names both would break the installation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

VERSIONS = {"s3torchconnector": "1.5.0", "s3fs": "2026.9.0"}
_PACKAGES = (
    "--no-deps",
    f"s3torchconnector=={VERSIONS['s3torchconnector']}",  # DCP's writer that AWS maintains
    f"s3torchconnectorclient=={VERSIONS['s3torchconnector']}",  # its client, on the CRT
    "tenacity",  # what its DCP part retries with
    f"s3fs=={VERSIONS['s3fs']}",  # S3 for fsspec, which torch's own DCP writer uses
    "aiobotocore==3.10.0",  # its client
    "botocore==1.43.117",  # the one that this aiobotocore was made for
    "aioitertools",  # its need
    "wrapt",  # its need
)
BUCKET, REGION = "checkpoints", "us-east-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": REGION,
    "AWS_DEFAULT_REGION": REGION,
}


def find_peers() -> Path:
    """The directory to put on the path; installs the libraries there the first time.

    Raises:
        RuntimeError: they cannot be installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    name = "-".join(f"{key}-{value}" for key, value in VERSIONS.items())
    place = cache / "elastictrainer" / name
    if not (place / ".complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--target", str(place), *_PACKAGES]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the peers could not be installed in {place}: {last}")
        (place / ".complete").touch()
    return place


def versions() -> dict[str, str]:
    """Of everything that is measured."""
    names = ("torch", "boto3", "botocore", "s5cmd", "fsspec")
    return {name: metadata.version(name) for name in names} | VERSIONS


def dcp_writer(peer: str, endpoint: str, path: str) -> Any:
    """A storage writer of DCP, below `path` of the bucket. The peers' directory is on the path."""
    url = f"s3://{BUCKET}/{path}"
    if peer == "fsspec":
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        # With sync_files it would sync every file system of the machine.
        return FsspecWriter(url, sync_files=False, client_kwargs={"endpoint_url": endpoint})
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageWriter
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    config = S3ClientConfig(force_path_style=True)
    writer = S3StorageWriter(REGION, url, s3client_config=config)
    # The writer itself has no argument for an endpoint.
    client = S3Client(region=REGION, endpoint=endpoint, s3client_config=config)
    writer.fs = S3FileSystem(REGION, s3_client=client)
    return writer


class Boto:
    """boto3's own transfer of whole files, all at once."""

    def __init__(self, endpoint: str) -> None:
        import boto3

        self._client = boto3.client("s3", endpoint_url=endpoint)

    def upload(self, files: list[Path], prefix: str) -> None:
        """Uploads them."""
        with ThreadPoolExecutor(len(files)) as pool:
            for _ in pool.map(lambda file: self._upload(file, f"{prefix}/{file.name}"), files):
                pass

    def _upload(self, file: Path, key: str) -> None:
        with file.open("rb") as stream:
            self._client.upload_fileobj(stream, BUCKET, key)


def s5cmd_upload(endpoint: str, files: list[Path], prefix: str, *, signed: bool) -> None:
    """Uploads files with s5cmd as it comes. Without signatures it does not hash the bodies, which
    over https it does not do either."""
    from checkpointing.stores.s3.s5cmd import binary

    command = [str(binary()), *([] if signed else ["--no-sign-request"])]
    command += [
        "--endpoint-url",
        endpoint,
        "cp",
        f"{files[0].parent}/*",
        f"s3://{BUCKET}/{prefix}/",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
