"""How another process reads a copy that a worker has made (`host_copy.py`). Without torch.

A buffer begins with the number of the copy in it, unique in its process. Whoever reads checks it
before and after, and before others may see what was made of it: a buffer that was used again
meanwhile, by a worker that took the reader for dead, must not be taken for the copy that it held.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

HEADER_BYTES = 64
"""Before the first slice; keeps the alignment of what follows."""

_NUMBER = struct.Struct("@q")


class CopyGoneError(RuntimeError):
    """The process with the copy ended before it was opened, or has made another one meanwhile."""


def stamp(memory: mmap.mmap, number: int) -> None:
    """From now on the buffer is for copy `number`."""
    _NUMBER.pack_into(memory, 0, number)


@contextmanager
def open_copy(pid: int, fd: int, number: int) -> Iterator[memoryview]:
    """The bytes of a copy in another process, which may end meanwhile.

    Args:
        pid: the process.
        fd: descriptor of the buffer there.
        number: of the copy.

    Raises:
        CopyGoneError: there is no such process or descriptor any more, or another copy, now or
            when the context ends.
        OSError: it belongs to another user.
    """
    try:
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise CopyGoneError(f"process {pid}, which made the copy, is gone") from error
    try:
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(file)
    copy = memoryview(memory)[HEADER_BYTES:]
    check_copy(copy, pid, number)
    yield copy
    check_copy(copy, pid, number)


def check_copy(copy: memoryview, pid: int, number: int) -> None:
    """Raises CopyGoneError where `copy`, as `open_copy` has yielded it, is not copy `number` any
    more. What was read of it until now is, where this returns."""
    (found,) = _NUMBER.unpack_from(copy.obj, 0)
    if found != number:
        raise CopyGoneError(f"process {pid} has copy {found} in the place of copy {number}")
