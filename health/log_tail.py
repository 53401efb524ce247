"""What a process writes to a file, read beside it: what is new, and its last words."""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 32 << 10
"""Read at once. A flood of more is skipped but for its end, so that it costs nobody much."""


class LogTail:
    """Reads what comes to a file from its construction on.

    Args:
        path: the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = _size(path)
        self._rest = b""

    def read(self) -> list[str]:
        """The whole lines since the last call. Nothing of a file that is gone."""
        size = _size(self._path)
        if size < self._read_bytes:  # it was begun anew
            self._read_bytes, self._rest = 0, b""
        if size == self._read_bytes:
            return []
        begin = max(self._read_bytes, size - MOST_BYTES)
        if begin > self._read_bytes:
            self._rest = b""
        found = self._rest + _read(self._path, begin, size)
        self._read_bytes = size
        *lines, rest = found.split(b"\n")
        self._rest = rest[-MOST_BYTES:]
        return [line.decode(errors="replace") for line in lines]


def read_last(path: Path, most_bytes: int) -> str:
    """The last whole lines of a file, `most_bytes` at most; nothing of one that cannot be read. A
    link is not followed: whoever can write beside a log must not have another file read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - most_bytes)
            found = os.pread(file.fileno(), size - begin, begin)
    except OSError:
        return ""
    if begin:
        found = found.partition(b"\n")[2]
    return found.decode(errors="replace")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, begin: int, end: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), end - begin, begin)
    except OSError:
        return b""
