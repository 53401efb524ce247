"""SHA-256 of source files, remembered: a file whose size and times are what they were is not read
again.

The memory is a JSON file beside the prepared data, without files that are gone. It is only ever a
shortcut: where it is lost or damaged, every file is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from checkpointing.whole_file import write_whole
from trainer.data.text import unreadable
from trainer.errors import ConfigError
from trainer.progress import tell

log = logging.getLogger(__name__)

_PIECE_BYTES = 2**22
_SETTLED_S = 2.0
"""A file that was changed less than this before it was looked at may change once more without
another time: file systems count it in ticks of up to two seconds."""


class HashedFile(NamedTuple):
    """A file, as it was before it was hashed."""

    path: Path
    mark: list[int]
    """Size in bytes, and times."""

    sha256: str

    @property
    def size_bytes(self) -> int:
        return self.mark[0]


def hash_files(paths: Sequence[Path], memory: Path, now_s: float | None = None) -> list[HashedFile]:
    """Size in bytes and SHA-256 of each file.

    Args:
        paths: absolute.
        memory: where hashes are kept from one call to the next.
        now_s: the time, in seconds since the epoch.

    Raises:
        ConfigError: a file cannot be read.
    """
    now_s = time.time() if now_s is None else now_s
    known, marks = _recall(memory), {path: _mark(path) for path in paths}
    hashes = {path: known[str(path)][1] for path in paths if _knows(known, path, marks[path])}
    new = [path for path in paths if path not in hashes]
    total, done = sum(marks[path][0] for path in new), 0
    what = f"hashing {len(new)} of {len(paths)} files, {total / 1e6:.1f} MB"
    try:
        for path in new:
            hashes[path] = _sha256(path, what, done, total)
            done += marks[path][0]
    finally:  # also half-way: what was read is not read again
        latest_ns = (now_s - _SETTLED_S) * 1e9
        settled = [path for path in new if path in hashes and max(marks[path][1:]) < latest_ns]
        if settled:
            kept = {path: told for path, told in known.items() if not _is_gone(path)}
            _keep(memory, {**kept, **{str(p): [marks[p], hashes[p]] for p in settled}})
    return [HashedFile(path, marks[path], hashes[path]) for path in paths]


def check_sizes(files: Sequence[HashedFile]) -> None:
    """Looks whether files have the size that they had when they were hashed: what takes hours does
    not begin where one has grown meanwhile.

    Raises:
        ConfigError: one has not, or cannot be read.
    """
    for file in files:
        if (size := _mark(file.path)[0]) != file.size_bytes:
            raise _changed(file, size)


def check_unchanged(files: Sequence[HashedFile]) -> None:
    """Looks whether files still are what they were when they were hashed. One whose times alone are
    others is hashed again.

    Raises:
        ConfigError: one is not, or cannot be read.
    """
    check_sizes(files)
    for file in files:
        if _mark(file.path) != file.mark and file.sha256 != _sha256(
            file.path, "hashing what has other times", 0, file.size_bytes
        ):
            raise _changed(file, _mark(file.path)[0])


def _changed(file: HashedFile, size: int) -> ConfigError:
    return ConfigError(
        "train.task.data.paths",
        str(file.path),
        f"it changed while it was read: it had {file.size_bytes} bytes when that began, and other "
        f"{size} bytes at the end",
        "Start again when nobody writes it any more, or leave it out",
    )


def _knows(known: dict[str, Any], path: Path, mark: list[int]) -> bool:
    return str(path) in known and known[str(path)][0] == mark


def _is_gone(path: str) -> bool:
    """Not so where its directory is not there either: that may be mounted on other machines."""
    return not os.path.lexists(path) and os.path.isdir(os.path.dirname(path))


def _mark(path: Path) -> list[int]:
    """What another content does not have as well: size and times."""
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _sha256(path: Path, what: str, before: int, total: int) -> str:
    digest, done = hashlib.sha256(), before
    tell(what, done, total)
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                done += len(piece)
                tell(what, done, total)
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


def _recall(memory: Path) -> dict[str, Any]:
    """Path -> its mark and hash."""
    try:
        told = json.loads(memory.read_bytes())
        return {path: [list(mark), str(digest)] for path, (mark, digest) in told.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep(memory: Path, known: dict[str, Any]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_whole(memory, json.dumps(known))
    except OSError as error:  # prepared data may lie where nobody may write
        log.debug("%s is not kept: %s", memory, error)
