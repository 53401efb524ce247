"""A node's memory as a place for snapshots: a private folder in tmpfs.

    /dev/shm/elastictrainer-snapshots-{user id}/{run}/{node}/{keys of a checkpoint store}

Files there outlive every process of the node, and end with the machine. The folder is a local store
like any other, so a snapshot is read, checked and swept as a checkpoint is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import logging
import os
import shutil
import stat
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from checkpointing.errors import CheckpointError, MissingError, StoreUnavailableError
from checkpointing.format.layout import Keys
from checkpointing.format.manifest import Manifest
from checkpointing.read.catalogue import list_steps, load_manifest
from checkpointing.stores.local import UNFINISHED, LocalStore

_log = logging.getLogger(__name__)

TMPFS = Path("/dev/shm")
"""Where Linux keeps files in memory."""

LEAVE_FREE = 0.1
"""Share of tmpfs that a snapshot leaves free: Ray's object store lives there too, and crashes where
it is full."""


@dataclass(frozen=True, kw_only=True)
class Stock:
    """What lies in a node's memory."""

    manifests: tuple[Manifest, ...]
    """Commit records that can be read."""
    sizes: Mapping[str, int]
    """Segment key -> bytes."""

    def has(self, key: str, size_bytes: int) -> bool:
        """Whether the whole of a segment seems to be there; its CRCs are checked on reading."""
        return self.sizes.get(key) == size_bytes


def memory_folder(run: Path) -> Path:
    """Where the snapshots of the run in directory `run` lie, on every node; this user's alone."""
    key = hashlib.sha256(str(run).encode()).hexdigest()[:16]
    return TMPFS / f"elastictrainer-snapshots-{os.getuid()}" / f"{run.name}-{key}"


def open_memory(folder: Path, node: str) -> LocalStore:
    """The part of `node` in a run's `memory_folder`.

    Raises:
        StoreUnavailableError: there is no tmpfs, or another user could read or write there.
    """
    for directory in (folder.parent, folder, folder / node):
        _make_private(directory)
    return LocalStore(folder / node)


@contextlib.contextmanager
def hold_room(store: LocalStore, needed_bytes: int) -> Iterator[HeldRoom]:
    """Room for `needed_bytes` in tmpfs, for what is written within to the store that this yields.
    A node's uploader and its holder of other nodes' copies begin together: each writer counts what
    the others of this machine will still take, of any process and run.

    Raises:
        StoreUnavailableError: too little of tmpfs would be left.
    """
    runs, path = store.root.parent.parent, store.root / f"{_NOTE}{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        with _locked(runs):
            _check_room(store, _held_bytes(runs) + needed_bytes)
            note = stack.enter_context(open(path, "xb", buffering=0))
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(note, fcntl.LOCK_EX)
            held = HeldRoom(store.root, note, needed_bytes)
        yield held


class HeldRoom(LocalStore):
    """A store that has room for so many bytes, see `hold_room`.

    Args:
        root: where it is.
        note: where the other writers read how many bytes are left. It is locked while this process
            writes: no lock outlives its process and those that it has forked.
        needed_bytes: in all.
    """

    def __init__(self, root: Path, note: FileIO, needed_bytes: int) -> None:
        super().__init__(root)
        self._note, self.left_bytes = note, needed_bytes
        """Of them, those that are not written yet."""
        self._tell()

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """See `Store.put`."""
        return super().put(key, self._counted(chunks))

    def _counted(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk
            self.left_bytes = max(0, self.left_bytes - memoryview(chunk).nbytes)  # it is written
            self._tell()

    def _tell(self) -> None:
        os.pwrite(self._note.fileno(), _FORM.pack(self.left_bytes), 0)


_NOTE, _FORM = "room-", struct.Struct("<q")
"""What the names of notes begin with, in a node's part, and what they say."""


def _held_bytes(runs: Path) -> int:
    """What the writers of this machine will still take."""
    return sum(_left_bytes(runs / note) for note in glob.glob(f"*/*/{_NOTE}*", root_dir=runs))


def _left_bytes(path: Path) -> int:
    """By the note of a writer; that of a killed one says nothing, and goes."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as note:  # it has ended
        try:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (left,) = _FORM.unpack(note.read(_FORM.size))
            return int(left)
        path.unlink(missing_ok=True)
    return 0


def _check_room(store: LocalStore, needed_bytes: int) -> None:
    space = os.statvfs(store.root)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    if free - needed_bytes < LEAVE_FREE * total:
        raise StoreUnavailableError(
            str(store.root),
            errno.ENOSPC,
            f"{needed_bytes / 1e6:.0f} MB, with what is being written there, would leave less than "
            f"{LEAVE_FREE:.0%} of {total / 1e6:.0f} MB ({free / 1e6:.0f} MB are free); "
            f"{_of_other_runs(store.root.parent)}make {TMPFS} larger, or set "
            f"checkpoint.memory_every to None",
        )


def _of_other_runs(folder: Path) -> str:
    """What to do about the snapshots of other runs than the one of `folder`, on this machine."""
    others = {run: _size_bytes(run) for run in folder.parent.iterdir() if run != folder}
    held = [f"{run} ({size / 1e6:.0f} MB)" for run, size in sorted(others.items()) if size]
    return f"delete what runs have left that are over, of {', '.join(held)}; " if held else ""


def _size_bytes(folder: Path) -> int:
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # its run goes on
                size += os.stat(os.path.join(path, name)).st_size
    return size


def settle_snapshot(store: LocalStore, manifest: Manifest) -> None:
    """Makes a snapshot count, all parts of which are in place, and deletes what it replaces."""
    store.put(Keys().commit(manifest.step), [manifest.to_bytes()])
    sweep_snapshots(store, manifest.step, manifest.generation, manifest)


def sweep_snapshots(store: LocalStore, step: int, generation: int, keep: Manifest | None) -> None:
    """Deletes everything of steps up to `step`, except the snapshot `keep` and what later
    generations than `generation` wrote: where the run went back, it does those steps again."""
    keys = Keys()
    kept = set() if keep is None else {keys.commit(keep.step), *keep.segments}
    for key in (*store.list(keys.commits), *store.list(keys.data)):  # records first
        belongs, wrote = keys.step_of(key), keys.generation_of(key)
        if key in kept or belongs is None or belongs > step:
            continue
        if wrote is None or wrote <= generation:
            store.delete(key)


def sweep_given_up(store: LocalStore, step: int, generation: int) -> None:
    """Deletes what earlier generations than `generation` wrote of steps after `step`: the run does
    them again from there, and the old parts would take the room of the new ones until it is past
    them."""
    keys = Keys()
    for later in [later for later in list_steps(store, keys) if later > step]:
        try:
            given_up = load_manifest(store, keys, later).generation < generation
        except CheckpointError:
            given_up = True
        if given_up:
            store.delete(keys.commit(later))
    for key in store.list(keys.data):
        wrote, belongs = keys.generation_of(key), keys.step_of(key)
        if wrote is not None and wrote < generation and belongs is not None and belongs > step:
            store.delete(key)


def take_stock(folder: Path, live: AbstractSet[str], node: str) -> Stock:
    """What `node` has of a run's snapshots, those of nodes that it takes the place of included.

    See `take_over`.
    """
    if not folder.is_dir():
        return Stock(manifests=(), sizes={})
    store, keys = open_memory(folder, node), Keys()
    take_over(folder, live, node)
    manifests = []
    for step in list_steps(store, keys):
        try:
            manifests.append(load_manifest(store, keys, step))
        except CheckpointError as error:
            _log.warning("passing over the snapshot of step %d: %s", step, error)
    return Stock(manifests=tuple(manifests), sizes=_sizes(store, keys.data))


def _sizes(store: LocalStore, prefix: str) -> dict[str, int]:
    """Of what is finished; writers and sweeps may be at work."""
    sizes = {}
    for key in store.list(prefix):
        if not key.endswith(UNFINISHED):
            with contextlib.suppress(MissingError):  # deleted meanwhile
                sizes[key] = store.size(key)
    return sizes


def clear_memory(folder: Path) -> None:
    """Deletes all snapshots of a run on this machine."""
    shutil.rmtree(folder, ignore_errors=True)  # on one machine several nodes may do so at once
    with contextlib.suppress(OSError):  # other runs have theirs there
        folder.parent.rmdir()


def take_over(folder: Path, live: AbstractSet[str], node: str) -> None:
    """Moves the files of nodes that are gone to `node`, which sweeps them with its own.

    A node that starts again has another name, and the memory of its machine. So a folder that
    belongs to none of the `live` nodes goes to whoever of them looks first; several nodes of a
    machine may try.
    """
    with _locked(folder):
        orphans = [d for d in folder.iterdir() if d.name not in live and d.name != node]
        orphans.sort(key=lambda d: d.stat().st_mtime)  # of two records the newer one stays
        for orphan in orphans:
            for file in [path for path in orphan.rglob("*") if path.is_file()]:
                target = folder / node / file.relative_to(orphan)
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # the note of a writer that ends
                    if not target.exists() or target.stat().st_mtime <= file.stat().st_mtime:
                        file.replace(target)
            shutil.rmtree(orphan)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        found = directory.lstat()
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not mine or stat.S_IMODE(found.st_mode) & 0o077:
            raise StoreUnavailableError(
                str(directory),
                errno.EACCES,
                f"not a directory of user {os.getuid()} alone (mode 0700); remove it",
            ) from None
    except OSError as error:
        raise StoreUnavailableError(
            str(directory),
            error.errno,
            f"{error.strerror}: no memory for snapshots; set checkpoint.memory_every to None",
        ) from error
