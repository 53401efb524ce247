"""Range reads of segments; every byte handed out has passed its CRC32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.errors import CorruptError
from checkpointing.format.manifest import CrcTable, Segment
from checkpointing.format.segment import first_bad_block, seed_of, table_crcs
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
    seed: int
    """What they begin at."""
    subject: str
    """What they are about, for errors."""


def block_checks(segment: Segment) -> Checks:
    """The CRC32s that the manifest has."""
    return Checks(
        segment=segment,
        begin=0,
        run_bytes=segment.block_bytes,
        end=segment.checked_bytes,
        crcs=segment.crcs,
        seed=seed_of(segment),
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

        Raises as `read_table`.
        """
        if segment.key not in self._tables:
            self._tables[segment.key] = Checks(
                segment=segment,
                begin=0,
                run_bytes=table.piece_bytes,
                end=table.begin,
                crcs=table_crcs(self.read_table(segment, table)),
                seed=seed_of(segment),
                subject="its CRC32",
            )
        return self._tables[segment.key]

    def read_table(self, segment: Segment, table: CrcTable) -> bytes:
        """The bytes of the table of `segment`.

        Raises:
            CorruptError: they failed their own CRC32 twice.
            StoreError: from the store.
        """
        own = Checks(
            segment=segment,
            begin=table.begin,
            run_bytes=segment.size_bytes - table.begin,
            end=segment.size_bytes,
            crcs=(table.crc32,),
            seed=seed_of(segment),
            subject="the CRC32 of its table of CRC32s",
        )
        return self.read(own, table.begin, segment.size_bytes)

    def read(self, checks: Checks, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, both of which are borders of runs.

        Raises:
            CorruptError: a run failed its CRC32 twice, or bytes were missing twice.
            StoreError: from the store.
        """
        data, error = self._attempt(checks, start, stop)
        if error:  # a flip on the way here is cured by reading again, one at rest is not
            data, error = self._attempt(checks, start, stop)
        if error:
            raise error
        return data

    def _attempt(self, checks: Checks, start: int, stop: int) -> tuple[bytes, CorruptError | None]:
        segment, run = checks.segment, checks.run_bytes
        data = self._source.get_range(segment.key, start, stop - start)
        first = (start - checks.begin) // run
        behind = -(-(stop - checks.begin) // run)
        if len(data) != stop - start:
            fact = f"{len(data)} of {stop - start} bytes came, twice"
            return data, CorruptError(
                segment.key, fact, start // segment.block_bytes, (start, stop)
            )
        bad = first_bad_block(data, checks.crcs[first:behind], run, checks.seed)
        if bad is None:
            return data, None
        at = start + bad * run
        where = at // segment.block_bytes, (at, min(at + run, checks.end))
        return data, CorruptError(segment.key, f"{checks.subject} differed twice", *where)
