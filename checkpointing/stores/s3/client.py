"""One request to S3, repeated until it is answered for good or its time is over.

boto3's own retries are off: they know neither the node's pace nor a deadline. Each try waits for
the node's turn (`pace.py`), and between tries is a pause with full jitter. A try is bounded by
`part_timeout_s` in the socket for what is sent, and by the reader's own clock for what is read.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    ReadTimeoutError,
    TokenRetrievalError,
)
from urllib3.exceptions import HTTPError

from checkpointing.stores.keys import check_key
from checkpointing.stores.s3.config import S3Config
from checkpointing.stores.s3.errors import (
    LOGIN_CODES,
    Failure,
    Refused,
    gave_up,
    not_set_up,
    read_failure,
)
from checkpointing.stores.s3.pace import plan_pause, shared_file, shared_pacer

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_CONNECT_TIMEOUT_S = 5.0
_QUIET_S = 1.0
_READ_BYTES = 1 << 20
_CONNECTIONS = 64
FAILURES = (ClientError, BotoCoreError, HTTPError, OSError)
"""What boto3 raises, inside `lapsed_credentials`, where a request or what it needs fails."""


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """When all tries for one object must have ended."""

    seconds: float
    """How long there was at the start."""
    started_s: float = field(default_factory=time.monotonic)
    """When that was, on the monotonic clock."""

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started_s

    @property
    def left_s(self) -> float:
        """Until the end; negative after it."""
        return self.seconds - self.elapsed_s


class S3Client:
    """Requests to one bucket. Any thread may use it.

    Raises:
        StoreUnavailableError: boto3's settings on this node do not serve.
    """

    def __init__(self, config: S3Config) -> None:
        self.config = config
        endpoint = endpoint_of(config)
        try:
            self._boto = _connect(config.region, endpoint, config.part_timeout_s, os.getpid())
        except (BotoCoreError, OSError, ValueError) as error:
            raise not_set_up(error, str(config)) from None
        self.pacer = shared_pacer(shared_file(f"{self._boto.meta.endpoint_url} {config.bucket}"))

    @property
    def region(self) -> str:
        """The region that requests are signed for."""
        return str(self._boto.meta.region_name)

    def where(self, key: str) -> str:
        """The URL of an object, for messages."""
        return f"{self.config}/{key}" if key else str(self.config)

    def deadline(self) -> Deadline:
        """The time for an object that is begun now."""
        return Deadline(seconds=self.config.timeout_s)

    def ask(
        self,
        operation: str,
        key: str | None,
        deadline: Deadline,
        read: Callable[[Any], _T],
        **arguments: Any,
    ) -> _T:
        """Asks until there is an answer, and returns what `read` makes of it.

        Args:
            operation: name of the method of boto3's client.
            key: the object's key in this store; None for a request about the bucket.
            deadline: bounds all tries.
            read: takes the response, and reads its body; part of the try.
            arguments: further ones of the operation.

        Raises:
            Refused: the answer is no, and will be.
            StoreError: not a key.
            StoreUnavailableError, CorruptError: no good answer before the deadline.
        """
        full = {"Bucket": self.config.bucket, **arguments}
        body: Any = arguments.get("Body")
        if key is not None:
            check_key(key)
            full["Key"] = self.config.prefix + key
        if self.config.expected_owner is not None:
            full["ExpectedBucketOwner"] = self.config.expected_owner

        def attempt() -> _T:
            if hasattr(body, "seek"):  # the last try may have sent some of it
                body.seek(0)
            with lapsed_credentials():
                answer = getattr(self._boto, operation)(**full)
            return read(answer)

        return self._repeat(attempt, self.where(key or ""), deadline)

    def _repeat(self, attempt: Callable[[], _T], where: str, deadline: Deadline) -> _T:
        tries = 0
        while True:
            tries += 1
            self.pacer.wait()
            try:
                answer = attempt()
            except FAILURES as error:
                # HTTPError: urllib3's own, of a body whose TLS breaks; botocore lets it through.
                failure = read_failure(error)
            else:
                self.pacer.faster()
                return answer
            # What boto3 raised is left out of the chain: its response may quote a signature.
            if failure.code in LOGIN_CODES:
                _connect.cache_clear()  # the next store looks for credentials anew
            if failure.answer == "refused":
                raise Refused(failure) from None
            self.pause(failure, where, deadline, tries)

    def pause(self, failure: Failure, where: str, deadline: Deadline, tries: int) -> None:
        """Waits after a failure that another try may mend.

        Raises:
            StoreUnavailableError, CorruptError: there is no time left for one.
        """
        if failure.answer == "slow":
            self.pacer.slower()
        pause_s, left_s = plan_pause(tries, random.random()), deadline.left_s
        if pause_s >= left_s:
            raise gave_up(failure, where, tries, deadline.elapsed_s) from None
        if deadline.elapsed_s >= _QUIET_S and tries.bit_count() == 1:  # less and less often
            _log.warning("waiting for %s for up to %.0f s more: %s", where, left_s, failure.fact)
        time.sleep(pause_s)

    def encryption(self) -> dict[str, str]:
        """Arguments that say how a new object is encrypted."""
        if self.config.encryption is None:
            return {}
        key = {} if self.config.kms_key_id is None else {"SSEKMSKeyId": self.config.kms_key_id}
        return {"ServerSideEncryption": self.config.encryption, **key}

    def read_body(self, response: Mapping[str, Any]) -> bytes:
        """The whole body of an answer, within `part_timeout_s` however slowly it comes."""
        body, chunks = response["Body"], []
        end_s = time.monotonic() + self.config.part_timeout_s
        with body:
            while chunk := body.read(_READ_BYTES):
                chunks.append(chunk)
                if time.monotonic() > end_s:
                    raise ReadTimeoutError(endpoint_url=str(self.config))
        return b"".join(chunks)


def nothing(_: Any) -> None:
    """For requests whose answer says nothing but that they succeeded."""


@contextmanager
def lapsed_credentials() -> Iterator[None]:
    """Gives names to what boto3 lets through bare when it renews credentials for a request: a
    RuntimeError where the new ones have expired, too, and a ValueError where what it is given for
    them cannot be read. What either says is left out: it may quote a secret."""
    try:
        yield
    except FAILURES:  # some are ValueErrors, too
        raise
    except RuntimeError as error:
        raise TokenRetrievalError(provider="boto3", error_msg=type(error).__name__) from None
    except ValueError as error:
        raise CredentialRetrievalError(provider="boto3", error_msg=type(error).__name__) from None


def endpoint_of(config: S3Config) -> str | None:
    """The server to ask; None: AWS's. boto3 reads the variables too, but would look for the bucket
    in the host's name, which a server other than AWS's seldom has."""
    if config.endpoint_url or os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") == "true":
        return config.endpoint_url
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


@functools.lru_cache(maxsize=16)
def _connect(region: str | None, endpoint_url: str | None, part_timeout_s: float, _pid: int) -> Any:
    """A client takes a tenth of a second to make, and holds the connections: a process has one."""
    return boto3.session.Session().client(
        "s3",
        region_name=region,
        endpoint_url=endpoint_url,
        config=Config(
            retries={"total_max_attempts": 1},
            connect_timeout=min(_CONNECT_TIMEOUT_S, part_timeout_s),
            read_timeout=part_timeout_s,
            max_pool_connections=_CONNECTIONS,
            tcp_keepalive=True,
            # Bodies carry CRC32s of our own; ranges have none, and are checked by the reader.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={
                # The CRC32 guards the body, as over TLS one of botocore's own would. Ours it does
                # not see, and it would hash every body again: a third of an upload's CPU time.
                "payload_signing_enabled": False,
                **({"addressing_style": "path"} if endpoint_url else {}),
            },
        ),
    )
