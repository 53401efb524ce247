"""A store on S3: one object per key below a prefix of a bucket.

    S3Store.put            ── upload.py      one PUT, or a multipart upload; CRC32s of our own
    S3Store.put_if_absent                    PUT with If-None-Match: *, always a single one
      └─ S3Client.ask      ── client.py      retries, deadline
           ├─ Pacer        ── pace.py        the node's pace, shared by its processes
           └─ read_failure ── errors.py      what an answer means

An object appears whole or not at all: that is S3's own promise for both kinds of upload. A writer
that is killed leaves parts of a multipart upload, which no listing of objects shows and which are
paid for; `abort_unfinished` ends them, and so should a lifecycle rule (`examples/aws/`).
"""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from checkpointing.errors import StoreError, StoreUnavailableError
from checkpointing.format.crc32 import crc32
from checkpointing.stores.keys import PROBE
from checkpointing.stores.probe import first_write_wins
from checkpointing.stores.s3.client import Deadline, S3Client, nothing
from checkpointing.stores.s3.config import S3Config
from checkpointing.stores.s3.errors import Refused, decide_failure, refused
from checkpointing.stores.s3.upload import WRITER, checksum, upload

_DELETE_AT_ONCE = 1000
_PROBE_TIMEOUT_S = 20.0


class S3Store:
    """Objects in a bucket, with keys below the prefix of `config.url`. Any thread may use it."""

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._client = S3Client(config)

    def __repr__(self) -> str:
        return f"S3Store({str(self.config)!r})"

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """See `Store.put`. Keeps the chunks of up to `upload_threads` + 1 parts."""
        with self._errors(key):
            return upload(self._client, key, chunks)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`.

        A try whose answer was lost may have written the object, and the next one is then told that
        the key is taken: the writer's mark on the object tells whose it is.
        """
        mark, deadline = uuid.uuid4().hex, self._client.deadline()
        with self._errors(key):
            try:
                self._client.ask(
                    "put_object",
                    key,
                    deadline,
                    nothing,
                    Body=data,
                    IfNoneMatch="*",
                    Metadata={WRITER: mark},
                    **checksum(crc32(data)),
                    **self._client.encryption(),
                )
            except Refused as error:
                if error.failure.code != "PreconditionFailed":
                    raise
                head = self._client.ask("head_object", key, deadline, dict)
                return bool(head["Metadata"].get(WRITER) == mark)
        return True

    def get(self, key: str) -> bytes:
        """See `Store.get`. S3's checksum of the whole object is checked where it has one."""
        return self._get(key, ChecksumMode="ENABLED")

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `Store.get_range`. S3 has no checksum of a range; the `Reader` has CRCs of blocks."""
        if length == 0:
            self.size(key)
            return b""
        try:
            return self._get(key, Range=f"bytes={start}-{start + length - 1}")
        except _BehindEnd:
            return b""

    def _get(self, key: str, **arguments: Any) -> bytes:
        with self._errors(key):
            try:
                return self._client.ask(
                    "get_object",
                    key,
                    self._client.deadline(),
                    self._client.read_body,
                    **arguments,
                )
            except Refused as error:
                if error.failure.code == "InvalidRange":
                    raise _BehindEnd from None
                raise

    def list(self, prefix: str) -> builtins.list[str]:
        """See `Store.list`. Shows finished objects only."""
        with self._errors(prefix):
            pages = self._pages(
                "list_objects_v2", prefix, ContinuationToken="NextContinuationToken"
            )
            keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return sorted(key.removeprefix(self.config.prefix) for key in keys)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._errors(key):
            self._client.ask("delete_object", key, self._client.deadline(), nothing)

    def delete_many(self, keys: Iterable[str]) -> None:
        """See `Store.delete_many`. One request for a thousand keys."""
        rest = iter(keys)
        while batch := builtins.list(islice(rest, _DELETE_AT_ONCE)):
            self._delete_batch(batch)

    def _delete_batch(self, keys: builtins.list[str]) -> None:
        deadline, tries = self._client.deadline(), 0
        left = {self.config.prefix + key: key for key in keys}
        while left:
            with self._errors(next(iter(left.values()))):
                answer = self._client.ask(
                    "delete_objects",
                    None,
                    deadline,
                    dict,
                    Delete={"Objects": [{"Key": full} for full in left], "Quiet": True},
                )
                tries += 1
                failed = answer.get("Errors", ())
                left = {entry["Key"]: left[entry["Key"]] for entry in failed}
                if failed:
                    self._check_failed(failed[0], deadline, tries)

    def _check_failed(self, entry: Mapping[str, str], deadline: Deadline, tries: int) -> None:
        """A key of a batch may fail for itself, within an answer of 200."""
        failure = decide_failure(entry.get("Code", ""), 0)
        if failure.answer == "refused":
            raise Refused(failure)
        where = f"s3://{self.config.bucket}/{entry['Key']}"
        self._client.pause(failure, where, deadline, tries)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        with self._errors(key):
            head = self._client.ask("head_object", key, self._client.deadline(), dict)
        return int(head["ContentLength"])

    def abort_unfinished(self, prefix: str = "") -> builtins.list[str]:
        """See `Store.abort_unfinished`."""
        with self._errors(prefix):
            pages = self._pages(
                "list_multipart_uploads",
                prefix,
                KeyMarker="NextKeyMarker",
                UploadIdMarker="NextUploadIdMarker",
            )
            found = [entry for page in pages for entry in page.get("Uploads", ())]
            for entry in found:
                key = entry["Key"].removeprefix(self.config.prefix)
                self._abort(key, entry["UploadId"])
        return sorted({entry["Key"].removeprefix(self.config.prefix) for entry in found})

    def _abort(self, key: str, upload_id: str) -> None:
        deadline = self._client.deadline()
        try:
            self._client.ask("abort_multipart_upload", key, deadline, nothing, UploadId=upload_id)
        except Refused as error:
            if error.failure.code != "NoSuchUpload":  # it has ended since the listing
                raise

    def _pages(self, operation: str, prefix: str, **markers: str) -> Iterator[dict[str, Any]]:
        """Every page of a listing; `markers`: argument of a request -> where its answer has it."""
        arguments: dict[str, Any] = {"Prefix": self.config.prefix + prefix}
        while True:
            page = self._client.ask(operation, None, self._client.deadline(), dict, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments.update({name: page[there] for name, there in markers.items()})

    def check_writable(self) -> None:
        """See `Store.check_writable`.

        Also that the bucket is in the region of the requests, and that the server honours
        `If-None-Match`, without which two commits could both succeed. Gives up after 20 s.
        """
        limit_s = min(self.config.timeout_s, _PROBE_TIMEOUT_S)
        probing = S3Store(replace(self.config, timeout_s=limit_s))
        probing._check_region()
        probe = f"{PROBE}{uuid.uuid4().hex}"
        try:
            if not first_write_wins(probing, probe):
                raise StoreError(
                    str(self.config),
                    "the server ignores If-None-Match, so two commits could both succeed; use one "
                    "that has conditional writes",
                )
            if probing.list(probe) != [probe]:
                raise StoreError(str(self.config), "a new object is not listed; use another server")
        finally:
            probing.delete(probe)

    def _check_region(self) -> None:
        deadline = self._client.deadline()
        with self._errors(""):
            try:
                head = self._client.ask("head_bucket", None, deadline, dict)
            except Refused:
                # The answer to HEAD has no body, so only that to another request says why.
                prefix = self.config.prefix
                self._client.ask(
                    "list_objects_v2", None, deadline, nothing, Prefix=prefix, MaxKeys=1
                )
                raise
        there, here = head.get("BucketRegion"), self._client.region
        if there and here not in (there, "aws-global"):
            raise StoreUnavailableError(
                str(self.config),
                None,
                f"the bucket is in {there}, requests go to {here}; set S3Config.region='{there}'",
            )

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            raise refused(error.failure, self._client.where(key)) from None


class _BehindEnd(Exception):
    """The range begins behind the end of the object."""
