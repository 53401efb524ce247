"""A record file read while it grows, whoever writes it.

Its writer may be lost in the middle of a line; the next one cuts the torn line off and appends
(`event_log.py`). So only whole lines are taken, and they stay where they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from elastic.protocol.events import Event
from elastic.reporting.record_lines import (
    kinds_of,
    may_be,
    object_of_line,
    size_of_lines,
    whole_lines,
)

log = logging.getLogger(__name__)

_Record = TypeVar("_Record")


class Follower(Generic[_Record]):
    """Takes what is appended to a record file, each record once.

    Args:
        path: the file. It need not be there yet.
        record_of: makes a record of a line's JSON object; None: the line is no record.
        from_start: what it holds now is taken, too; else it is passed over.
        kinds: of events, lines of other kinds are passed over unparsed; all are taken for none.
    """

    def __init__(
        self,
        path: Path,
        record_of: Callable[[dict[str, Any]], _Record | None],
        *,
        from_start: bool = False,
        kinds: Collection[type[Event]] = (),
    ) -> None:
        self._path, self._record_of = path, record_of
        self._kinds = kinds_of(kinds)
        self._offset = 0
        self._inode: int | None = None
        self.anew = False
        """Whether the last call found another file in the place: a run that was begun anew."""
        if not from_start:
            with suppress(OSError), path.open("rb") as file:  # it may not be there yet
                self._inode, self._offset = os.fstat(file.fileno()).st_ino, size_of_lines(file)

    def take(self) -> list[_Record]:
        """The records since the last call. A damaged line is logged and passed over."""
        lines = (one for one in self._whole_lines() if not self._kinds or may_be(one, self._kinds))
        return [record for record in map(self._record, lines) if record is not None]

    def _whole_lines(self) -> Iterator[bytes]:
        self.anew = False
        # It is not there yet, or out of reach: the next call reads on.
        with suppress(OSError), self._path.open("rb") as file:
            there = os.fstat(file.fileno())
            other = self._inode not in (None, there.st_ino)
            self.anew = other or there.st_size < self._offset
            self._inode, self._offset = there.st_ino, 0 if self.anew else self._offset
            for line in whole_lines(file, self._offset, there.st_size):
                self._offset += len(line) + 1
                yield line

    def _record(self, line: bytes) -> _Record | None:
        try:
            record = self._record_of(object_of_line(line))
            if record is None:
                raise ValueError("it lacks fields")
            return record
        except ValueError as error:
            log.warning("a line of %s is passed over: %s", self._path, error)
            return None
