"""Reads and checks every byte of a checkpoint.

    verify_checkpoint
      ├─ manifest    its seal, its schema, its step; every slice inside its tensor and its segment
      ├─ coverage    the slices cover every element of every tensor exactly once
      ├─ size        every segment is there, in the size that was written
      ├─ crc32       every block of every segment, headers included
      └─ table       every table of CRC32s, and what it says; reads of less than a block go by it

Segments are read in chunks by a few threads, so the memory in use is threads × chunk, whatever the
size of the checkpoint. Nothing stops at the first finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from checkpointing.errors import (
    CheckpointError,
    CorruptError,
    MissingError,
    SliceError,
    StoreError,
)
from checkpointing.format.coverage import check_coverage
from checkpointing.format.crc32 import crc32
from checkpointing.format.layout import Keys
from checkpointing.format.manifest import CrcTable, Manifest, Segment
from checkpointing.format.segment import bad_block_of, check_table, seed_of
from checkpointing.read.catalogue import check_kept, load_manifest
from checkpointing.read.second_look import is_damage
from checkpointing.stores import Store

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it was written."""

    key: str
    """The object."""
    check: str
    """What failed: manifest, coverage, missing, unreadable, size, crc32 or table; or unreachable:
    the store refused, which says nothing of the object."""
    fact: str
    """How, with the numbers."""

    def __str__(self) -> str:
        return f"{self.key}: {self.check}: {self.fact}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a verification has found."""

    step: int
    """Of which checkpoint."""
    manifest: Manifest | None
    """Its commit record, where that can be read."""
    findings: tuple[Finding, ...]
    """All that is wrong; none: every byte is as it was written."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the checkpoint's segments."""
        return _size_bytes(self.manifest) if self.manifest else 0


Progress = Callable[[int, int], None]
"""Called with the bytes checked so far and all bytes."""


def verify_checkpoint(
    store: Store,
    keys: Keys,
    step: int,
    *,
    threads: int = 8,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Reads and checks the checkpoint of `step`. Writes nothing.

    Args:
        store: where it is.
        keys: names in the store.
        step: which one.
        threads: reads under way at once; each holds up to 16 MiB, or one CRC block if larger.
        progress: told how far it is.

    Raises:
        NotCommittedError: there is no checkpoint of that step, or none any more.
        StoreUnavailableError: the store refuses the commit record; of a segment it is a finding.
    """
    try:
        manifest = load_manifest(store, keys, step)
    except CorruptError as error:
        finding = Finding(key=keys.commit(step), check="manifest", fact=error.fact)
        return Verification(step=step, manifest=None, findings=(finding,))
    findings = [*_check_coverage(manifest, keys.commit(step))]
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        segments = list(manifest.segments.values())
        misfits = [found for found in pool.map(partial(_check_size, store), segments) if found]
        findings += misfits
        bad = {finding.key for finding in misfits}
        findings += _check_bytes(store, pool, [s for s in segments if s.key not in bad], progress)
    if findings:
        check_kept(store, keys, manifest)
    return Verification(step=step, manifest=manifest, findings=tuple(findings))


def _size_bytes(manifest: Manifest) -> int:
    return sum(segment.size_bytes for segment in manifest.segments.values())


def _check_coverage(manifest: Manifest, key: str) -> Iterator[Finding]:
    try:
        check_coverage(manifest.slices)
    except SliceError as error:
        yield Finding(key=key, check="coverage", fact=str(error))


def _check_size(store: Store, segment: Segment) -> Finding | None:
    try:
        size = store.size(segment.key)
    except MissingError:
        return Finding(key=segment.key, check="missing", fact="no such object")
    except (StoreError, CorruptError) as error:
        return _unreadable(segment, error)
    if size == segment.size_bytes:
        return None
    return Finding(
        key=segment.key, check="size", fact=f"{size} bytes; {segment.size_bytes} were written"
    )


def _check_bytes(
    store: Store, pool: ThreadPoolExecutor, segments: list[Segment], progress: Progress
) -> Iterator[Finding]:
    jobs = [job for segment in segments for job in _jobs(segment)]
    total, done = sum(stop - start for _, start, stop, _ in jobs), 0
    findings = pool.map(partial(_check_run, store), jobs)
    for (_, start, stop, _), finding in zip(jobs, findings, strict=True):
        done += stop - start
        progress(done, total)
        if finding is not None:
            yield finding


_Job = tuple[Segment, int, int, Callable[[bytes], Finding | None]]
"""A segment, the first byte and the end of a run of its bytes, and what checks that run."""


def _jobs(segment: Segment) -> Iterator[_Job]:
    step = max(1, _CHUNK_BYTES // segment.block_bytes) * segment.block_bytes
    for start in range(0, segment.checked_bytes, step):
        stop = min(start + step, segment.checked_bytes)
        yield segment, start, stop, partial(_check_blocks, segment, start)
    table = segment.table
    if table is not None:
        yield segment, table.begin, segment.size_bytes, partial(_check_table, segment, table)


def _check_run(store: Store, job: _Job) -> Finding | None:
    segment, start, stop, check = job
    try:
        data = store.get_range(segment.key, start, stop - start)
    except (StoreError, CorruptError) as error:
        return _unreadable(segment, error)
    if len(data) != stop - start:
        fact = f"{len(data)} bytes came for bytes {start} to {stop}"
        return Finding(key=segment.key, check="size", fact=fact)
    return check(data)


def _unreadable(segment: Segment, error: CheckpointError) -> Finding:
    check = "unreadable" if is_damage(error) else "unreachable"
    return Finding(key=segment.key, check=check, fact=str(error))


def _check_blocks(segment: Segment, start: int, data: bytes) -> Finding | None:
    bad = bad_block_of(segment, start, data)
    if bad is None:
        return None
    at = bad * segment.block_bytes
    end = min(at + segment.block_bytes, segment.checked_bytes)
    return Finding(
        key=segment.key,
        check="crc32",
        fact=f"block {bad} (bytes {at} to {end}) is not what was written",
    )


def _check_table(segment: Segment, table: CrcTable, data: bytes) -> Finding | None:
    """Compares a table with its CRC32, and what it says with the CRC32s of the blocks."""
    if crc32(data, seed_of(segment)) != table.crc32:
        fact = f"bytes {table.begin} to {segment.size_bytes} are not the table that was written"
        return Finding(key=segment.key, check="table", fact=fact)
    try:
        check_table(data, segment, table)
    except CorruptError as error:
        return Finding(key=segment.key, check="table", fact=error.fact)
    return None
