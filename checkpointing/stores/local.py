"""A store in a local directory (or a shared file system): one file per object.

Objects become visible by a rename or a hard link of a finished, synced file, so no reader ever sees
part of one, and neither does anyone after a power cut. A writer that is killed leaves a `*.part`
file beside its target; `list` shows it, so that whoever sweeps the store finds it.
"""

from __future__ import annotations

import builtins
import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointing.errors import CorruptError, MissingError, StoreError, StoreUnavailableError
from checkpointing.stores.keys import PROBE, check_key
from checkpointing.stores.probe import first_write_wins
from checkpointing.whole_file import sync

UNFINISHED = ".part"
"""Ending of the name of what is being written."""

_NEXT_KNOB = {
    errno.ENOSPC: "free space there, or store elsewhere",
    errno.EDQUOT: "raise the quota there, or store elsewhere",
    errno.EACCES: "let this user read and write there, or store elsewhere",
    errno.EPERM: "let this user read and write there, or store elsewhere",
    errno.EROFS: "mount it writable, or store elsewhere",
}

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links answer, as some over FUSE and CIFS."""


class LocalStore:
    """Objects as files under `root`, which is made by the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """See `Store.put`."""
        target = self._path(key)
        with self._errors(key, target), _finished_file(target, chunks) as (part, size):
            os.replace(part, target)
            sync(target.parent)
        return size

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`. The file system must have hard links."""
        target = self._path(key)
        with self._errors(key, target), _finished_file(target, [data]) as (part, _):
            try:
                os.link(part, target)
            except FileExistsError:
                # An NFS client that lost the answer sends the request again, and meets its own
                # link. Source: open(2), O_EXCL.
                if os.stat(part).st_nlink != 2:
                    return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                fact = (
                    f"{os.strerror(error.errno)}: its file system has no hard links, which a "
                    f"commit needs; store on one that has them (docs/clusters.md)"
                )
                raise StoreUnavailableError(str(target), error.errno, fact) from error
            sync(target.parent)
        return True

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        path = self._path(key)
        with self._errors(key, path):
            _file_size(key, path)
            return path.read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `Store.get_range`."""
        path = self._path(key)
        with self._errors(key, path):
            _file_size(key, path)
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(length)

    def list(self, prefix: str) -> builtins.list[str]:
        """See `Store.list`."""
        parent = prefix.rpartition("/")[0]
        directory = self._path(parent) if parent else self.root
        with self._errors(prefix, directory):
            keys = [path.relative_to(self.root).as_posix() for path in _files_below(directory)]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """See `Store.delete`. Takes the file's directory with it if that is empty now."""
        path = self._path(key)
        with self._errors(key, path):
            path.unlink(missing_ok=True)
            if path.parent != self.root:
                _remove_if_empty(path.parent)

    def delete_many(self, keys: Iterable[str]) -> None:
        """See `Store.delete_many`."""
        for key in keys:
            self.delete(key)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        path = self._path(key)
        with self._errors(key, path):
            return _file_size(key, path)

    def check_writable(self) -> None:
        """See `Store.check_writable`. Also that of two commits only one succeeds."""
        probe = f"{PROBE}{uuid.uuid4().hex}"
        try:
            if not first_write_wins(self, probe):
                raise StoreError(
                    str(self.root),
                    "its file system lets a hard link replace a file, so two commits could both "
                    "succeed; store on another (docs/clusters.md)",
                )
        finally:
            self.delete(probe)

    def abort_unfinished(self, prefix: str = "") -> builtins.list[str]:
        """See `Store.abort_unfinished`."""
        parts = [key for key in self.list(prefix) if key.endswith(UNFINISHED)]
        self.delete_many(parts)
        return sorted({key.rsplit(".", 2)[0] for key in parts})

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    @contextmanager
    def _errors(self, key: str, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise MissingError(key, f"no such object in {self.root}") from error
        except OSError as error:
            knob = _NEXT_KNOB.get(error.errno or 0, "check this path, or store elsewhere")
            fact = f"{os.strerror(error.errno or 0)}; {knob}"
            raise StoreUnavailableError(str(path), error.errno, fact) from error


def _file_size(key: str, path: Path) -> int:
    """Raises CorruptError for what is no file: opening a FIFO or a device could wait for ever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CorruptError(
            key, f"{path} is not a file (its mode is {stat.filemode(found.st_mode)})"
        )
    return found.st_size


@contextmanager
def _finished_file(
    target: Path, chunks: Iterable[bytes | memoryview]
) -> Iterator[tuple[Path, int]]:
    """Writes and syncs a file beside `target`; yields its path and size, and removes the path."""
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}{UNFINISHED}")
    _make_directory(target.parent)
    try:
        size = 0
        with open(part, "xb", buffering=0) as file:
            for chunk in chunks:
                size += _write_all(file.fileno(), memoryview(chunk).cast("B"))
            os.fsync(file.fileno())
        yield part, size
    finally:
        part.unlink(missing_ok=True)


def _write_all(descriptor: int, data: memoryview) -> int:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    return written


def _make_directory(path: Path) -> None:
    if path.is_dir():
        return
    _make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    sync(path.parent)


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _files_below(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        # A directory that is not there (yet, or any more) holds no objects.
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, _, names in os.walk(directory, onerror=refuse):
        for name in names:
            yield Path(parent) / name
