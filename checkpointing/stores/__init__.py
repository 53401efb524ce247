"""Where checkpoints lie: the few operations on objects that everything else is built from.

Keys are strings with `/` between the parts. The operations are those of an object store, so that a
local directory and S3 serve alike; nothing here knows what a checkpoint is.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from checkpointing.errors import StoreError
from checkpointing.stores.local import LocalStore
from checkpointing.stores.s3.config import S3Config


class Store(Protocol):
    """Objects under keys.

    Every operation raises StoreUnavailableError when the storage refuses (permission, space,
    network), and StoreError for a key that the store cannot have.
    """

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Writes an object from a stream, replacing one that is there.

        The object appears whole and durable when this returns, or not at all. The chunks are taken
        one by one; their memory must not change before this returns, for a store sends from it.

        Returns:
            The object's size in bytes.
        """

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Writes a small object unless the key is taken. Of several callers exactly one wins.

        Returns:
            Whether this call wrote it.
        """

    def get(self, key: str) -> bytes:
        """The whole object. Raises MissingError when there is none."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`, fewer where the object ends. Raises MissingError."""

    def list(self, prefix: str) -> builtins.list[str]:
        """All keys that begin with `prefix`, sorted.

        May show what a killed writer left behind, under a key that no writer returned from.
        """

    def delete(self, key: str) -> None:
        """Removes an object; none under the key is fine."""

    def delete_many(self, keys: Iterable[str]) -> None:
        """Removes objects, in the order of `keys` or all at once."""

    def size(self, key: str) -> int:
        """Size in bytes. Raises MissingError."""

    def abort_unfinished(self, prefix: str = "") -> builtins.list[str]:
        """Removes what killed writers left of objects whose keys begin with `prefix`.

        Ends the writes that are under way, too: for the start of a run, before it has writers.

        Returns:
            The keys that were being written.
        """

    def check_writable(self) -> None:
        """Writes and removes a small object, so that a run can fail before it starts."""


class RangeSource(Protocol):
    """The part of a `Store` that a `Reader` needs."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `Store.get_range`."""


def open_store(where: str | os.PathLike[str] | S3Config) -> Store:
    """The store at an `s3://` or `file://` URL or a plain path, which need not exist yet.

    Args:
        where: the place; an `S3Config` where a URL does not say enough.

    Raises:
        StoreError: another scheme, or a `file://` URL of another host.
        CheckpointConfigError: an `s3://` URL without a proper bucket.
    """
    if isinstance(where, S3Config):
        from checkpointing.stores.s3.store import (
            S3Store,  # boto3 takes a third of a second to import
        )

        return S3Store(where)
    text = os.fspath(where)
    scheme, mark, _ = text.partition("://")
    if not mark:
        return LocalStore(Path(text).expanduser())
    if scheme == "s3":
        return open_store(S3Config(url=text))
    parts = urlsplit(text)
    if scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise StoreError(text, "not a store: write s3://BUCKET/PREFIX, file:///DIR or a plain path")
    return LocalStore(Path(unquote(parts.path)))
