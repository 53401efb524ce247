"""The record of suspect machines: a JSON file beside the runs, which all of them share.

Read whole and checked, written by an atomic rename. Whoever changes it holds a lock, so no run
loses the mark of another.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpointing.whole_file import write_whole
from elastic.errors import SuspectFileError
from health.suspects import Mark, Record, add_marks, date_back, from_json, to_json

log = logging.getLogger(__name__)

FILE = "suspect-nodes.json"


class SuspectFile:
    """The record of a storage path. Every call reads the file; none belongs on an event loop.

    Args:
        storage: the directory that the runs lie in.
    """

    def __init__(self, storage: Path) -> None:
        self.path = storage / FILE

    def read(self) -> dict[str, tuple[Mark, ...]]:
        """The record as it is to be weighed now: a mark of a wrong clock fades from when the file
        was written. Raises as `kept` does."""
        record, written = self._load()
        return date_back(record, time.time(), written)

    def kept(self) -> dict[str, tuple[Mark, ...]]:
        """The record as it is in the file, for whoever changes it; empty where there is none.

        Raises:
            SuspectFileError: the file holds something else.
        """
        return self._load()[0]

    def _load(self) -> tuple[dict[str, tuple[Mark, ...]], float]:
        """The record, and when it was written, in seconds since the epoch."""
        try:
            with self.path.open("rb") as file:
                return from_json(json.loads(file.read())), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return {}, 0.0
        except ValueError as error:
            raise SuspectFileError(str(self.path), str(error)) from error

    def add(self, machine: str, mark: Mark) -> tuple[Mark, ...]:
        """Adds a mark. Returns all that the machine has now. Raises as `add_all` does."""
        return self.add_all({machine: (mark,)})[machine]

    def add_all(self, more: Record) -> dict[str, tuple[Mark, ...]]:
        """Adds marks of machines. Returns all of the record. A file that was damaged, as by a power
        loss, is set aside: else nothing would be remembered any more.

        Raises:
            SuspectFileError: the file holds something else, and is left as it is.
        """
        with self._locked():
            self._set_aside_if_damaged()
            record = add_marks(self.kept(), more)
            self._write(record)
        return record

    def take_back(self, machine: str, wrong: Callable[[Mark], bool]) -> None:
        """Forgets those marks of a machine that are wrong."""
        with self._locked():
            record = self.kept()
            if kept := tuple(mark for mark in record.pop(machine, ()) if not wrong(mark)):
                record[machine] = kept
            self._write(record)

    def clear(self, machine: str | None) -> int:
        """Forgets a machine, or with None all of them and whatever the file holds. Returns how many
        are forgotten."""
        with self._locked():
            if machine is None:
                count = len(self._readable())
                self.path.unlink(missing_ok=True)
                return count
            record = self.kept()
            if record.pop(machine, None) is None:
                return 0
            self._write(record)
            return 1

    def _set_aside_if_damaged(self) -> None:
        try:
            json.loads(self.path.read_bytes())
        except FileNotFoundError:
            pass
        except ValueError as error:
            aside = self.path.with_suffix(".damaged")
            log.warning("%s is no JSON (%s), and is kept as %s", self.path, error, aside)
            os.replace(self.path, aside)

    def _readable(self) -> Record:
        with contextlib.suppress(SuspectFileError):
            return self.kept()
        return {}

    def _write(self, record: Record) -> None:
        text = json.dumps(to_json(record), indent=1, allow_nan=False)
        write_whole(self.path, text, durable=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_name(f".{FILE}.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
