"""Where on S3 checkpoints lie, and how to get there. Imports without boto3.

Credentials are not among it: they come from the default chain (environment, shared files, the role
of the instance or container), so none can end up in a log, a message or a pickle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

from checkpointing.errors import CheckpointConfigError
from checkpointing.field_types import settle_types
from checkpointing.stores.protocols import StorePlace

Encryption = Literal["AES256", "aws:kms"]

SETTINGS = "region", "endpoint_url", "encryption", "kms_key_id", "expected_owner"
"""Fields that whoever opens the store elsewhere needs beside its URL. None is secret."""

MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 5 << 30
MAX_PARTS = 10_000

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, kw_only=True)
class S3Config(StorePlace):
    """A bucket and a prefix in it, with everything that a request needs besides credentials.

    Raises:
        CheckpointConfigError: a value that cannot work.
    """

    url: str
    """`s3://bucket/prefix`. Every key of the store lies below it."""

    region: str | None = None
    """Region of the bucket; None: the one of the environment or of ~/.aws/config."""

    endpoint_url: str | None = None
    """Another server than AWS's (MinIO, a VPC endpoint); its buckets are named in the path. None:
    what AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL say, or AWS."""

    encryption: Encryption | None = None
    """`AES256` is SSE-S3, `aws:kms` SSE-KMS; None leaves it to the bucket's default, which is
    SSE-S3 unless its owner chose another."""

    kms_key_id: str | None = None
    """Key for `aws:kms`; None: the account's `aws/s3` key."""

    expected_owner: str | None = None
    """Account that must own the bucket (12 digits), so that nothing goes to a stranger's bucket of
    a mistyped name; None does not check."""

    part_bytes: int = 32 << 20
    """Objects larger than this go up in parts of this size."""

    upload_threads: int = 4
    """Parts of one object under way at once; S3 takes 85–90 MB/s per connection."""

    part_timeout_s: float = 60.0
    """Bound on one try at sending a part, and on one at reading a range."""

    timeout_s: float = 600.0
    """No try for an object begins after this; then the save or the load fails."""

    def __post_init__(self) -> None:
        wrong = settle_types(self)
        if wrong is not None:
            shown = "..." if wrong.field.endswith("url") else wrong.value  # it may hold a password
            raise CheckpointConfigError(
                f"checkpoint.store.{wrong.field}", shown, wrong.fact, wrong.fix
            )
        self._check_url()
        self._check_endpoint()
        self._check_encryption()
        if self.expected_owner is not None and not re.fullmatch(r"\d{12}", self.expected_owner):
            raise _wrong("expected_owner", self.expected_owner, "not 12 digits", "an account id")
        if not MIN_PART_BYTES <= self.part_bytes <= MAX_PART_BYTES:
            raise _wrong("part_bytes", self.part_bytes, "S3 takes 5 MiB to 5 GiB", "16 to 64 MiB")
        for name in ("upload_threads", "part_timeout_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise _wrong(name, getattr(self, name), "not positive", "a positive number")

    def __str__(self) -> str:
        return self.url.rstrip("/")

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """What stands before every key: empty, or with a slash at its end."""
        path = urlsplit(self.url).path.strip("/")
        return f"{path}/" if path else ""

    @property
    def settings(self) -> dict[str, str]:
        """What the URL does not say: those of `SETTINGS` that are set."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in values.items() if value is not None}

    def below(self, name: str) -> S3Config:
        """The same with `name` as a further part of the prefix."""
        return replace(self, url=f"{self}/{name}")

    def _check_url(self) -> None:
        scheme, _, rest = self.url.partition("://")
        bucket, _, path = rest.partition("/")
        parts = path.rstrip("/").split("/") if path.rstrip("/") else []
        if (
            scheme != "s3"
            or not _BUCKET.fullmatch(bucket)
            or any(part in ("", ".", "..") for part in parts)
            or set("?#\0") & set(self.url)
        ):
            shown = "..." if "@" in self.url else self.url  # somebody may have put a password in
            raise _wrong("url", shown, "not a bucket and a prefix", "s3://BUCKET/PREFIX")

    def _check_endpoint(self) -> None:
        if self.endpoint_url is None:
            return
        parts = urlsplit(self.endpoint_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            # The value is not shown: it may hold a password.
            raise _wrong("endpoint_url", "...", "not http(s)://HOST[:PORT]", "that, and no user")

    def _check_encryption(self) -> None:
        if self.kms_key_id is not None and self.encryption != "aws:kms":
            raise _wrong(
                "kms_key_id", self.kms_key_id, "only aws:kms uses one", "encryption='aws:kms' too"
            )


def _wrong(field: str, value: object, fact: str, instead: str) -> CheckpointConfigError:
    return CheckpointConfigError(f"checkpoint.store.{field}", value, fact, f"Write {instead}")
