"""The lines of a record file, forward or from its end, and what a line is before it is parsed.

To parse a line costs far more than to read it, and most questions are about few of a run's million
events. The writer puts an event's kind first: a glance there tells which lines need no parsing.
Lines that do not begin as the writer's do, such as damaged ones, are left to the parser.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from elastic.protocol.events import Event

_BLOCK_BYTES = 1 << 18

_KIND = re.compile(rb'\{"kind": "(\w+)"')
_TIME = rb'"time": (\d+(?:\.\d+)?(?:e\+?\d+)?), "'
_SIGNS = re.compile(rb'\{"kind": "signs_changed", ' + _TIME + rb'node": "([^"\\]*)", "')
_STEP = re.compile(rb'\{"step": (\d+), "loss": [^{}\[\]]*?' + _TIME)


def kinds_of(kinds: Iterable[type[Event]]) -> set[bytes]:
    """Names of kinds of events, for `may_be`."""
    return {kind.kind.encode() for kind in kinds}


def may_be(line: bytes, kinds: Collection[bytes]) -> bool:
    """Whether a line may hold an event of one of `kinds`; those of other kinds need no parsing."""
    found = _KIND.match(line)
    return found is None or found[1] in kinds


def glance_at_signs(line: bytes) -> tuple[float, bytes] | None:
    """Time and node of a `SignsChanged`; None: it is something else, or must be parsed."""
    found = _SIGNS.match(line)
    return None if found is None else (float(found[1]), found[2])


def glance_at_step(line: bytes) -> tuple[int, float] | None:
    """Step and time of a step record; None: the line must be parsed."""
    found = _STEP.match(line)
    return None if found is None else (int(found[1]), float(found[2]))


def whole_lines(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """The lines between two places of a file, the first of which begins one. What follows the last
    newline is left out.

    Each line is of one read: between two, a torn line could be cut off and another one begun.
    """
    size = _BLOCK_BYTES
    while begin < end:
        data = os.pread(file.fileno(), min(size, end - begin), begin)
        *lines, rest = data.split(b"\n")
        if not lines and len(data) < size:
            return
        yield from lines
        begin += len(data) - len(rest)
        size = _BLOCK_BYTES if lines else 2 * size


def lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Whole lines, the last one first; none when there is no file yet."""
    if not path.exists():
        return
    with path.open("rb") as file:
        place, rest = max(0, size_of_lines(file) - 1), b""
        while place:
            size = min(_BLOCK_BYTES, place)
            place -= size
            rest, *lines = (os.pread(file.fileno(), size, place) + rest).split(b"\n")
            yield from reversed(lines)
        if rest:
            yield rest


def size_of_lines(file: BinaryIO) -> int:
    """Bytes of a record file up to its last newline, which is the last of them."""
    place = file.seek(0, os.SEEK_END)
    while place:
        size = min(_BLOCK_BYTES, place)
        place -= size
        found = os.pread(file.fileno(), size, place).rfind(b"\n")
        if found >= 0:
            return place + found + 1
    return 0


def object_of_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a whole line. Raises ValueError: it holds none."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"not a JSON object but {type(data).__name__}")
    return data
