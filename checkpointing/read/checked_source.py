"""Range reads of segments; every byte handed out has passed its CRC32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.errors import CorruptError
from checkpointing.format.manifest import CrcTable, Segment
from checkpointing.format.segment import first_bad_block, table_crcs
from checkpointing.stores import RangeSource


@dataclass(frozen=True, kw_only=True)
class Checks:
    """CRC32s of equal runs of bytes that lie one behind the other in a segment."""

    segment: Segment
    """Which one."""
    begin: int
    """First byte of the first run."""
    run_bytes: int
    """Bytes under one CRC; the last run may be short."""
    end: int
    """Behind the last run."""
    crcs: Sequence[int]
    """Of each run."""
    subject: str
    """What they are about, for errors."""


def block_checks(segment: Segment) -> Checks:
    """The CRC32s that the manifest has."""
    return Checks(
        segment=segment,
        begin=0,
        run_bytes=segment.block_bytes,
        end=segment.size_bytes,
        crcs=segment.crcs,
        subject="its CRC32",
    )


class CheckedSource:
    """Reads and checks segments. Keeps the tables that it has read: 1/4096 of their segments.

    Args:
        source: where the segments lie.
    """

    def __init__(self, source: RangeSource) -> None:
        self._source = source
        self._tables: dict[str, Checks] = {}

    def piece_checks(self, segment: Segment, table: CrcTable) -> Checks:
        """The CRC32s of the table of `segment`, which is read the first time.

        Raises:
            CorruptError: it failed its own CRC32 twice.
            StoreError: from the store.
        """
        if segment.key not in self._tables:
            size = segment.size_bytes - table.begin
            own = Checks(
                segment=segment,
                begin=table.begin,
                run_bytes=size,
                end=segment.size_bytes,
                crcs=(table.crc32,),
                subject="the CRC32 of its table of CRC32s",
            )
            self._tables[segment.key] = Checks(
                segment=segment,
                begin=0,
                run_bytes=table.piece_bytes,
                end=table.begin,
                crcs=table_crcs(self.read(own, table.begin, segment.size_bytes)),
                subject="its CRC32",
            )
        return self._tables[segment.key]

    def read(self, checks: Checks, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, both of which are borders of runs.

        Raises:
            CorruptError: a run failed its CRC32 twice.
            StoreError: from the store.
        """
        data, bad = self._attempt(checks, start, stop)
        if bad is not None:  # a flip on the way here is cured by reading again, one at rest is not
            data, bad = self._attempt(checks, start, stop)
        if bad is not None:
            at = start + bad * checks.run_bytes
            segment, end = checks.segment, min(at + checks.run_bytes, checks.end)
            block = at // segment.block_bytes
            raise CorruptError(segment.key, f"{checks.subject} differed twice", block, (at, end))
        return data

    def _attempt(self, checks: Checks, start: int, stop: int) -> tuple[bytes, int | None]:
        first = (start - checks.begin) // checks.run_bytes
        behind = -(-(stop - checks.begin) // checks.run_bytes)
        data = self._source.get_range(checks.segment.key, start, stop - start)
        return data, first_bad_block(data, checks.crcs[first:behind], checks.run_bytes)
