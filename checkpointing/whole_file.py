"""Small files that are written anew."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes a file, whole or not at all: whoever reads it sees what was there, or all of `data`.
    Any process may, at the same time. Raises OSError."""
    part = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        part.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
