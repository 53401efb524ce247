"""The two append-only files of a run directory that hold its records, written and read.

`events.jsonl` holds one `Event` a line, written by the coordinator as things happen; `steps.jsonl`
holds one `StepRecord` a line, one for each committed step. Both are only appended to, also when a
run is continued, and each line is one plain JSON object.

Contract of the files: a record is a line *with its newline*. What follows the last newline is a
write cut short by a crash; readers ignore it and the next writer cuts it off.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from elastic.protocol.events import (
    Event,
    RunEnded,
    RunStarted,
    StepRecord,
    event_from_json,
    step_from_json,
)
from elastic.reporting.record_lines import (
    glance_at_signs,
    glance_at_step,
    kinds_of,
    lines_from_the_end,
    may_be,
    object_of_line,
    size_of_lines,
    whole_lines,
)

log = logging.getLogger(__name__)

_Parsed = TypeVar("_Parsed")

MOST_PENDING_BYTES = 16 << 20
"""What is kept of records while the disk is full: those of tens of thousands of steps."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class RecordError(ValueError):
    """A whole line of a record file is not what the file should hold."""

    def __init__(self, path: str, line: int, fact: str) -> None:
        super().__init__(path, line, fact)
        self.path, self.line, self.fact = path, line, fact

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.fact}. The file was damaged after it was written; "
            f"delete line {self.line} to read the rest."
        )


class EventLog:
    """Appends records to one file; each is in the operating system's hands when `append` returns.

    There it outlives a crash of the process; after `sync` one of the machine, too. A full disk is
    no reason to stop: a checkpoint that does not fit fills it until it is taken back. Records wait
    for room, up to `MOST_PENDING_BYTES`.

    Args:
        path: the file; its directory is made when it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._pending = bytearray()
        self._closing = threading.Lock()
        """Held by `sync`: the number of a closed file may be another one's."""
        _cut_torn_tail(self._path)

    def append(self, record: Event | StepRecord) -> None:
        """Write one record as one line; what is no text in it, as of a file's name that is no
        UTF-8, as "?". Raises OSError: that fails, and not for want of room."""
        line = json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False)
        self._pending += line.encode(errors="replace") + b"\n"
        try:
            self._write()
        except OSError as error:
            if error.errno not in _FULL or len(self._pending) > MOST_PENDING_BYTES:
                raise

    def _write(self) -> None:
        """A part of a line may go out, and the rest with the next call."""
        while self._pending:
            del self._pending[: self._file.write(self._pending)]

    def sync(self) -> None:
        """Wait until what was written is on the disk, or on the file system's server; what `write`
        had no room for is passed by. Any thread may call it, while another one appends.

        Raises:
            OSError: that fails. For want of room, too: a network file system says so here, of
                what it has taken, and then forgets it.
        """
        with self._closing:
            if not self._file.closed:
                os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file, synced; a second call does nothing. Raises OSError: there is no room
        yet."""
        with self._closing:
            if not self._file.closed:
                with self._file:
                    self._write()
                    os.fdatasync(self._file.fileno())

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(
    path: str | os.PathLike[str],
    *,
    kinds: Collection[type[Event]] = (),
    lenient: bool = False,
) -> list[Event]:
    """The events of a file in the order they were written; none when there is no file yet.

    Args:
        path: the file.
        kinds: only events of these; all for none. A million others cost less than a second.
        lenient: a damaged line is logged and passed over.

    Raises:
        RecordError: a whole line is not a JSON object, or its time no number. Of other kinds lines
            are not parsed.
    """
    events = _read_lines(Path(path), event_from_json, kinds, lenient=lenient)
    only = tuple(kinds) or Event
    return [event for event in events if isinstance(event, only)]


def events_to_go_on_from(path: str | os.PathLike[str], since: float) -> list[Event]:
    """As `read_events`, for a coordinator that is started anew: a damaged line is logged and passed
    over, and of what nodes showed before `since`, in seconds since the epoch, there is the last of
    each alone. In a run of months they may have told that a million times, with all signs of theirs
    each time: the others are neither parsed nor held."""
    found, nodes = list[Event](), set[bytes]()
    for line in lines_from_the_end(Path(path)):
        time, node = glance_at_signs(line) or (inf, b"")
        if time < since and node in nodes:
            continue
        try:
            found.append(event_from_json(object_of_line(line)))
        except ValueError as error:
            log.warning("a line of %s is passed over: %s", path, error)
            continue
        if time < since:
            nodes.add(node)
    return found[::-1]


def read_steps(
    path: str | os.PathLike[str], *, digests: bool = True, lenient: bool = False
) -> list[StepRecord]:
    """The steps that count, by step; none when there is no file yet.

    When a run went back to an earlier state, it did some steps again: of each step the last record
    stays, and records of later steps that were committed before the run went back are dropped.

    Args:
        path: the file.
        digests: keep `sample_digests`, of which each step has one for each lane.
        lenient: a damaged line is logged and passed over.

    Raises:
        RecordError: a whole line is not a step record.
    """
    kept: dict[int, StepRecord] = {}
    newest = -1

    def parse(data: dict[str, Any]) -> StepRecord:
        if not digests and "sample_digests" in data:
            data["sample_digests"] = []
        if (record := step_from_json(data)) is None:
            raise ValueError(f"a step record lacks fields, it has {sorted(data)}")
        return record

    for record in _read_lines(Path(path), parse, lenient=lenient):
        for later in range(record.step + 1, newest + 1):
            if later in kept and kept[later].generation < record.generation:
                del kept[later]
        kept[record.step] = record
        newest = max(newest, record.step)
        while newest not in kept:
            newest -= 1
    return [kept[step] for step in sorted(kept)]


def last_event(path: str | os.PathLike[str]) -> Event | None:
    """The last event of a file; None where there is none, or the last line is none."""
    for line in lines_from_the_end(Path(path)):
        try:
            return event_from_json(object_of_line(line))
        except ValueError:
            break
    return None


def last_events(path: str | os.PathLike[str], *kinds: type[Event]) -> list[Event]:
    """The last event of each of `kinds` in a file, in their order, without those of which there is
    none. Reads no further back than that; a damaged line is passed over."""
    found: dict[type[Event], Event] = {}
    missing = kinds_of(kinds)
    for line in lines_from_the_end(Path(path)):
        if not missing:
            break
        if not may_be(line, missing):
            continue
        try:
            event = event_from_json(object_of_line(line))
        except ValueError:
            continue
        if (name := event.kind.encode()) in missing:
            missing.remove(name)
            found[type(event)] = event
    return [found[kind] for kind in kinds if kind in found]


def present_start(happened: Sequence[Event], began: float) -> Sequence[Event]:
    """The events of the present start of a run, if that is the one that `began` (the time of its
    `RunStarted`); none where it has not come to write that down, and what is there is of a start
    before it.

    Args:
        happened: the events of all starts.
        began: see above.
    """
    starts = [(i, e.time) for i, e in enumerate(happened) if isinstance(e, RunStarted)]
    first, time = starts[-1] if starts else (0, None)
    return happened[first:] if time == began else []


def find_end(path: str | os.PathLike[str], began: float) -> RunEnded | None:
    """How the start of a run ended that `began` then; None where it has not. See `present_start`.
    Nothing follows an end but the next start."""
    end = last_event(path)
    return end if isinstance(end, RunEnded) and has_begun(path, began) else None


def has_begun(path: str | os.PathLike[str], began: float) -> bool:
    """Whether the newest start in a file is the one that `began` then. See `present_start`."""
    return [one.time for one in last_events(path, RunStarted)] == [began]


def last_step(
    path: str | os.PathLike[str], counts: Callable[[StepRecord], bool], *, lenient: bool = False
) -> StepRecord | None:
    """The last step record of a file that `counts`; None where there is none.

    Reads no further back than that: a coordinator that is started anew must not wait for a million
    records.

    Args:
        path: the file.
        counts: see above.
        lenient: a damaged line is passed over.

    Raises:
        RecordError: a whole line on the way is not a step record.
    """
    for line in lines_from_the_end(Path(path)):
        record = _step_of(line)
        if record is None and not lenient:
            read_steps(path)  # raises, and knows the line's number
        if record is not None and counts(record):
            return record
    return None


def recent_steps(path: str | os.PathLike[str], before: int, count: int) -> list[StepRecord]:
    """The last `count` steps that count and lie before step `before`, in order; where one of them
    is damaged, those after it; where that is the first that was done again, its earlier record
    stands in. Reads no further back than that: from the end the last record of each step comes
    first, and one of an earlier step shows that none comes any more."""
    found: list[StepRecord] = []
    for line in lines_from_the_end(Path(path)):
        wanted = before - len(found) - 1
        if len(found) == count or wanted < 0:
            break
        record = _step_of(line)
        if record is not None and record.step < wanted:
            break
        if record is not None and record.step == wanted:
            found.append(record)
    return found[::-1]


def steps_after(path: str | os.PathLike[str], time: float) -> list[StepRecord]:
    """The step records that were made after `time`, in seconds since the epoch, in the order of the
    file, without their digests; those that do not count any more included. Reads no further back
    than that."""
    found: list[StepRecord] = []
    for line in lines_from_the_end(Path(path)):
        record = _step_of(line)
        if record is not None and record.time <= time:
            break
        found += [] if record is None else [replace(record, sample_digests=[])]
    return found[::-1]


def steps_before(path: str | os.PathLike[str], times: Iterable[float]) -> list[StepRecord]:
    """Of the steps that count (see `read_steps`) the last one by each of `times`, in seconds since
    the epoch, and the last of all; by step, without their digests. Reads no further back than that,
    and parses no others; a damaged line is passed over."""
    waiting = sorted({inf, *times})
    found: list[StepRecord] = []
    earliest = inf
    for line in lines_from_the_end(Path(path)):
        if not waiting:
            break
        record = None
        if (seen := glance_at_step(line)) is None:
            if (record := _step_of(line)) is None:
                continue
            seen = record.step, record.time
        step, time = seen
        if step >= earliest:
            continue  # it was done again
        if time <= waiting[-1]:
            if (record := record or _step_of(line)) is None:
                continue
            found.append(replace(record, sample_digests=[]))
            del waiting[bisect_left(waiting, time) :]
        earliest = step
    return found[::-1]


def _step_of(line: bytes) -> StepRecord | None:
    """The step record in a line; None where it is damaged."""
    try:
        return step_from_json(object_of_line(line))
    except ValueError:
        return None


def _read_lines(
    path: Path,
    parse: Callable[[dict[str, Any]], _Parsed],
    kinds: Collection[type[Event]] = (),
    *,
    lenient: bool = False,
) -> Iterator[_Parsed]:
    """The records of a record file; what follows the last newline is not a record. See
    `read_events` for `kinds` and `lenient`. `parse` may raise ValueError."""
    if not path.exists():
        return
    names = kinds_of(kinds)
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        for number, line in enumerate(whole_lines(file, 0, end), start=1):
            if names and not may_be(line, names):
                continue
            try:
                record = parse(object_of_line(line))
            except ValueError as error:
                damaged = RecordError(str(path), number, str(error))
                if not lenient:
                    raise damaged from error
                log.warning("a line is passed over: %s", damaged)
            else:
                yield record


def _cut_torn_tail(path: Path) -> None:
    """Drop what follows the last newline, so that the next record starts on a line of its own."""
    with path.open("rb+") as file:
        file.truncate(size_of_lines(file))
