"""One object goes up: in one request where it is small, in parts where it is not.

Every request carries the CRC32 of its bytes, and S3 refuses others; a multipart object's own
checksum is made of those of its parts. A stream that has CRC32s of its own spares a second pass.
Both kinds can be repeated: a mark in the object's metadata tells whether the object that is there
is the one of this upload. The bytes go from where they lie to the socket and are copied nowhere.
"""

from __future__ import annotations

import base64
import contextlib
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from checkpointing.errors import CheckpointError, StoreError
from checkpointing.format.crc32 import crc32
from checkpointing.stores.s3.client import Deadline, S3Client, nothing
from checkpointing.stores.s3.config import MAX_PARTS
from checkpointing.stores.s3.errors import Refused

WRITER = "writer"
"""Name of the metadata entry that holds the writer's mark."""

_ABORT_TIMEOUT_S = 10.0


def upload(client: S3Client, key: str, chunks: Iterable[bytes | memoryview]) -> int:
    """Writes an object from a stream; returns its size in bytes.

    Raises:
        Refused: S3 says no.
        StoreUnavailableError, CorruptError: it did not succeed in time.
        StoreError: the stream is too long for its parts.
    """
    if isinstance(chunks, Checked) and chunks.whole_bytes > MAX_PARTS * client.config.part_bytes:
        raise _too_long(client, key)
    deadline = client.deadline()
    parts = gather(chunks, client.config.part_bytes)
    first = next(parts, Part())
    if len(first) < client.config.part_bytes:
        client.ask(
            "put_object",
            key,
            deadline,
            nothing,
            Body=first,
            **checksum(first.crc32),
            **client.encryption(),
        )
        return len(first)
    return _Multipart.begin(client, key, deadline).run(first, parts)


def _too_long(client: S3Client, key: str) -> StoreError:
    return StoreError(
        client.where(key),
        f"more than {MAX_PARTS} parts of {client.config.part_bytes} bytes; raise "
        f"S3Config.part_bytes, or lower checkpoint.segment_bytes",
    )


@runtime_checkable
class Checked(Protocol):
    """A stream that knows its size, and CRC32s of what has passed."""

    whole_bytes: int
    """Of all that passes."""

    def crc32_between(self, start: int, stop: int) -> int | None:
        """Of bytes that have passed; None where it does not know that one."""


class Part:
    """A stretch of an object, as the pieces of memory that it lies in; a file to boto3.

    One piece is read at a time, however little is asked for: urllib3 asks for 16 KiB and sends
    what it gets, and thousands of small sends would take longer than a copy.
    """

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []
        self._next = self._size = 0
        self._crc32: int | None = None

    def __len__(self) -> int:
        return self._size

    def add(self, piece: memoryview) -> None:
        """Takes a piece, which must not change from now on."""
        self._pieces.append(piece)
        self._size += len(piece)

    def told(self, crc32: int | None) -> None:
        """Takes the CRC32 of the whole from somebody who knows it."""
        self._crc32 = crc32

    @property
    def crc32(self) -> int:
        """Of all bytes."""
        if self._crc32 is not None:
            return self._crc32
        crc = 0
        for piece in self._pieces:
            crc = crc32(piece, crc)
        return crc

    def read(self, _: int = -1) -> memoryview | bytes:
        """The next piece; nothing at the end."""
        if self._next == len(self._pieces):
            return b""
        self._next += 1
        return self._pieces[self._next - 1]

    def seek(self, offset: int, whence: int = 0) -> int:
        """Back to the beginning, which is what is asked for before another try."""
        if offset or whence:
            raise OSError("a part is sent from its beginning")
        self._next = 0
        return 0


def gather(chunks: Iterable[bytes | memoryview], part_bytes: int) -> Iterator[Part]:
    """A stream as parts of `part_bytes`; the last one may be shorter."""
    part, begin = Part(), 0
    for chunk in chunks:
        data = memoryview(chunk).cast("B")
        while len(data):
            room = part_bytes - len(part)
            part.add(data[:room])
            data = data[room:]
            if len(part) == part_bytes:
                yield _checked(part, begin, chunks)
                part, begin = Part(), begin + part_bytes
    if len(part):
        yield _checked(part, begin, chunks)


def _checked(part: Part, begin: int, chunks: Iterable[bytes | memoryview]) -> Part:
    """Called when the stream has given the part's last byte."""
    if isinstance(chunks, Checked):
        part.told(chunks.crc32_between(begin, begin + len(part)))
    return part


def checksum(crc32: int) -> dict[str, str]:
    """Arguments by which S3 checks the body that it gets, and keeps the checksum for readers."""
    crc = crc32.to_bytes(4, "big")
    return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": base64.b64encode(crc).decode()}


@dataclass(frozen=True, kw_only=True)
class _Multipart:
    """A multipart upload that has begun."""

    client: S3Client
    key: str
    deadline: Deadline
    upload_id: str
    mark: str

    @classmethod
    def begin(cls, client: S3Client, key: str, deadline: Deadline) -> _Multipart:
        """Opens it."""
        mark = uuid.uuid4().hex
        answer = client.ask(
            "create_multipart_upload",
            key,
            deadline,
            dict,
            ChecksumAlgorithm="CRC32",
            Metadata={WRITER: mark},
            **client.encryption(),
        )
        return cls(
            client=client, key=key, deadline=deadline, upload_id=answer["UploadId"], mark=mark
        )

    def run(self, first: Part, rest: Iterator[Part]) -> int:
        """Sends all parts and completes the object; whatever goes wrong, no parts stay behind."""
        try:
            sent = self._send_all(first, rest)
            self._complete([part for part, _ in sent])
        except BaseException:
            self._abort()
            raise
        return sum(size for _, size in sent)

    def _send_all(self, first: Part, rest: Iterator[Part]) -> list[tuple[dict[str, Any], int]]:
        threads = self.client.config.upload_threads
        under_way: deque[Future[tuple[dict[str, Any], int]]] = deque()
        sent = []
        with ThreadPoolExecutor(threads, thread_name_prefix="s3-upload") as pool:
            under_way.append(pool.submit(self._send, 1, first))
            for number, part in enumerate(rest, start=2):
                under_way.append(pool.submit(self._send, number, part))
                if len(under_way) >= threads:  # so the stream is read no faster than it goes out
                    sent.append(under_way.popleft().result())
            sent.extend(future.result() for future in under_way)
        return sent

    def _send(self, number: int, part: Part) -> tuple[dict[str, Any], int]:
        if number > MAX_PARTS:  # of a stream that did not tell its size
            raise _too_long(self.client, self.key)
        crc = checksum(part.crc32)
        etag = self.client.ask(
            "upload_part",
            self.key,
            self.deadline,
            lambda answer: answer["ETag"],
            UploadId=self.upload_id,
            PartNumber=number,
            Body=part,
            **crc,
        )
        entry = {"PartNumber": number, "ETag": etag, "ChecksumCRC32": crc["ChecksumCRC32"]}
        return entry, len(part)

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        try:
            self.client.ask(
                "complete_multipart_upload",
                self.key,
                self.deadline,
                nothing,
                UploadId=self.upload_id,
                MultipartUpload={"Parts": parts},
            )
        except Refused as error:
            # After a lost answer the upload may be gone because it was completed.
            if error.failure.code != "NoSuchUpload" or not self._is_there():
                raise

    def _is_there(self) -> bool:
        try:
            head = self.client.ask("head_object", self.key, self.deadline, dict)
        except Refused:
            return False
        return bool(head["Metadata"].get(WRITER) == self.mark)

    def _abort(self) -> None:
        with contextlib.suppress(Refused, CheckpointError):  # the error on its way says more
            self.client.ask(
                "abort_multipart_upload",
                self.key,
                Deadline(seconds=_ABORT_TIMEOUT_S),
                nothing,
                UploadId=self.upload_id,
            )
