"""What a store can do."""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol


class Store(Protocol):
    """Objects under keys.

    Every operation raises StoreUnavailableError when the storage refuses (permission, space,
    network), and StoreError for a key that the store cannot have. What reads raises CorruptError
    where what lies under the key is no object, or came damaged again and again.
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


class StorePlace(ABC):
    """Where a store lies and how to get there: plain data without secrets, which goes to every
    worker. Its text is its URL, and the URL's scheme says which kind of store it is."""

    @abstractmethod
    def __str__(self) -> str:
        """The URL, without anything secret."""

    @abstractmethod
    def below(self, name: str) -> StorePlace:
        """The same with `name` as a further part of the path."""
