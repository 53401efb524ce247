"""Small files that are written anew."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def sync(path: Path) -> None:
    """So that a power cut leaves what is in a file, or the names in a directory. Raises OSError,
    which names it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # the system's names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: str | bytes, *, durable: bool = False) -> None:
    """Writes a file, whole or not at all: whoever reads it sees what was there, or all of `data`.
    Any process may, at the same time. With `durable` that holds after a power loss, too, which may
    leave an empty file of that name. Raises OSError."""
    part = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with part.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
