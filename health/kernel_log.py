"""The kernel's log, line by line: from now on, or what it still has of before.

/dev/kmsg gives one record at a read: "priority,number,time,flags;text", with lines below it that
begin with a blank, which are not needed. Source: Linux, Documentation/ABI/testing/dev-kmsg.
"""

from __future__ import annotations

import os
from pathlib import Path

KMSG = Path("/dev/kmsg")

_OWN_PIDS = Path("/proc/self/ns/pid")
_FIRST_PIDS = "pid:[4026531836]"
"""The first namespace of processes, whose numbers the log has. Source: Linux, proc_ns.h
(PROC_PID_INIT_INO, 0xEFFFFFFC)."""

_MOST_LINES = 1000
"""At one call: what a storm leaves behind is read with the next ones, or overwritten."""
_RECORD_BYTES = 8192
"""The kernel gives no longer ones."""


def parse_record(record: bytes) -> str:
    """The text of a record, its first line."""
    _, _, text = record.decode(errors="replace").partition(";")
    return text.split("\n", 1)[0]


def has_our_pids() -> bool:
    """Whether the processes in the log have the numbers by which this process knows them: not in a
    container with a namespace of its own, such as a pod without `hostPID`."""
    return os.readlink(_OWN_PIDS) == _FIRST_PIDS


class KernelLog:
    """Reads what the kernel says from its construction on.

    Args:
        path: where it can be read.
        past: reads first what the kernel has kept of before.

    Raises:
        OSError: it cannot, as in most containers.
    """

    def __init__(self, path: Path = KMSG, *, past: bool = False) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not past:
            os.lseek(self._file, 0, os.SEEK_END)

    def read(self) -> list[str]:
        """The lines since the last call. Does not wait."""
        lines: list[str] = []
        while len(lines) < _MOST_LINES:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # some were overwritten; the next read gives the oldest that is left
            if not record:
                break
            lines.append(parse_record(record))
        return lines

    def close(self) -> None:
        """Closes it."""
        os.close(self._file)


def open_kernel_log(path: Path = KMSG, *, past: bool = False) -> KernelLog | None:
    """The kernel's log; None where it may not be read. Arguments as for `KernelLog`."""
    try:
        return KernelLog(path, past=past)
    except OSError:
        return None
