"""A record file read while it grows, whoever writes it.

Its writer may be lost in the middle of a line; the next one cuts the torn line off and appends
(`event_log.py`). So only whole lines are taken, and they stay where they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from elastic.reporting.event_log import object_of_line, size_of_lines

log = logging.getLogger(__name__)

_Record = TypeVar("_Record")


class Follower(Generic[_Record]):
    """Takes what is appended to a record file, each record once.

    Args:
        path: the file. It need not be there yet.
        record_of: makes a record of a line's JSON object; None: the line is no record.
        from_start: what it holds now is taken, too; else it is passed over.
    """

    def __init__(
        self,
        path: Path,
        record_of: Callable[[dict[str, Any]], _Record | None],
        *,
        from_start: bool = False,
    ) -> None:
        self._path, self._record_of = path, record_of
        self._offset = 0
        self._inode: int | None = None
        self.anew = False
        """Whether the last call found another file in the place: a run that was begun anew."""
        if not from_start:
            with suppress(OSError), path.open("rb") as file:  # it may not be there yet
                self._inode, self._offset = os.fstat(file.fileno()).st_ino, size_of_lines(file)

    def take(self) -> list[_Record]:
        """The records since the last call. A damaged line is logged and passed over."""
        records = (self._record(line) for line in self._whole_lines())
        return [record for record in records if record is not None]

    def _whole_lines(self) -> list[bytes]:
        self.anew = False
        try:
            with self._path.open("rb") as file:
                there = os.fstat(file.fileno())
                other = self._inode not in (None, there.st_ino)
                self.anew = other or there.st_size < self._offset
                self._inode, self._offset = there.st_ino, 0 if self.anew else self._offset
                new = there.st_size - self._offset
                # One read: between two, a torn line could be cut off and another one begun.
                data = os.pread(file.fileno(), new, self._offset)
        except OSError:  # it is not there yet, or out of reach: the next call reads on
            return []
        *lines, torn = data.split(b"\n")
        self._offset += len(data) - len(torn)
        return lines

    def _record(self, line: bytes) -> _Record | None:
        try:
            record = self._record_of(object_of_line(line))
            if record is None:
                raise ValueError("it lacks fields")
            return record
        except ValueError as error:
            log.warning("a line of %s is passed over: %s", self._path, error)
            return None
