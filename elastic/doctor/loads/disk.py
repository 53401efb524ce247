"""Writes a file, has the disk keep it, and reads it back from there. Where the folder is not there
yet, in the nearest above it.

python -m elastic.doctor.loads.disk FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zlib
from pathlib import Path

SIZE_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20


def nearest_there(folder: Path) -> Path:
    """A folder, or the nearest above it that is there: a run makes the rest.

    Raises:
        OSError: it cannot be reached, or a link on the way leads nowhere: no run makes its target.
    """
    try:
        folder.stat()
    except FileNotFoundError as error:
        if folder.is_symlink():
            raise FileNotFoundError(error.errno, f"{folder} is a link to nowhere") from None
        return nearest_there(folder.absolute().parent)
    return folder


def measure(folder: Path, size_bytes: int = SIZE_BYTES) -> dict[str, float]:
    """Returns bytes per second, `write` with the flush and `read` without the page cache, where
    the file system lets it go; and whether what came back was `wrong`."""
    written = os.urandom(size_bytes)
    with tempfile.TemporaryFile(dir=folder) as file:
        begin_s = time.perf_counter()
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - begin_s
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin_s, crc = time.perf_counter(), 0
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
        read_s = time.perf_counter() - begin_s
    return {
        "write": size_bytes / write_s,
        "read": size_bytes / read_s,
        "wrong": int(crc != zlib.crc32(written)),
    }


if __name__ == "__main__":
    print(json.dumps({"result": measure(nearest_there(Path(sys.argv[1])))}))
