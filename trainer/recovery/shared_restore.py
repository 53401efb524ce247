"""Reads a saved state once for all replicas, and hands it round.

The workers with the same (shard, tensor) need the same bytes. Each reads its share of them
(`plan_shares`) and the others get it over the cross group:

    read      every worker its share, straight into its place on the host
    vote      who could not? Another replica's worker tries that share once
    vote      can all of it be had?
    hand      each share from its reader to all, a buffer at a time
    compare   the copies; agree inside the replica

Each opens the record of the step for itself, and all must have opened the same: below a mount that
is missing on one node an old copy of the store may lie, and all CRCs of that are right. The votes
carry what tells records apart, and so does the agreement inside the replica.

Until then the model is not touched. Both answers, "it cannot be read" and "a peer is gone", are
taken by a replica's workers together, and the first by all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpointing import (
    Box,
    CheckpointError,
    OtherRecordError,
    Reader,
    Rows,
    TensorSlice,
    plan_places,
    plan_shares,
)
from checkpointing.format.cutting import pack
from checkpointing.read.assignment import LEAST_BYTES
from trainer.engine.engine import Engine
from trainer.errors import CrossGroupLost
from trainer.recovery.numbers import numbers_of
from trainer.replication.replicas import CrossGroup

BUFFER_BYTES = 64 << 20
"""Most that one broadcast carries."""

_BATCH_BYTES = 512 << 20
"""Read between two looks at whether this worker is called away."""

_MARK_DIGITS = 13
"""Hex digits of a record's SHA-256 that are compared: what a float64 holds."""

Saved = tuple[Reader, Mapping[str, Any]]
"""A saved state: its tensors, and the training state beside them."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state that has arrived in whole."""

    values: Mapping[str, torch.Tensor]
    """This worker's tensors, by name."""
    optimizer_steps: int
    """Steps that reached the weights."""
    skipped_in_a_row: int
    """Latest steps that did not."""


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """No worker that tried can read some part, or not all have opened the same; all replicas
    know."""

    error: CheckpointError | None
    """Why, on the workers that tried."""
    peer_gone: bool = False
    """No others have tried: one is gone, and only this worker knows. A regroup is due."""


def read_together(
    engine: Engine,
    cross: CrossGroup,
    open_saved: Callable[[], Saved],
    *,
    least_bytes: int = LEAST_BYTES,
) -> Restored | Unreadable | None:
    """Reads this worker's part of a saved state. All workers of all replicas call it.

    Args:
        engine: says what its part is; it is not changed.
        cross: the workers with the same part.
        open_saved: finds the saved state. It and the reader may raise CheckpointError.
        least_bytes: see `checkpointing.read.assignment`.

    Returns:
        None where a peer is gone: a regroup is due. Where this worker could not read before that,
        it says so: the peer may be gone because it waited too long for this one.
    """
    part = _Part(engine, cross, open_saved, least_bytes)
    lost = False
    try:
        part.get()
    except CrossGroupLost:
        lost = True
    (first,) = engine.hand_out([float(part.mark)])
    other = bool(first and part.mark and first != part.mark)
    votes = [float(part.unreadable), float(lost), float(other)]
    unreadable, gone, others = engine.sum_in_replica(votes)
    if others and not (unreadable or gone):
        part.refuse()
        unreadable = others
    if unreadable:
        return Unreadable(error=part.error)
    if gone:
        return None if part.error is None else Unreadable(error=part.error, peer_gone=True)
    return part.restored()


class Staging:
    """A worker's part of a state on the host: one run of bytes, and a view of each tensor in it.

    Args:
        slices: the tensors, none empty.
    """

    def __init__(self, slices: Sequence[TensorSlice]) -> None:
        self.slices = slices
        self._dtypes = [getattr(torch, part.dtype) for part in slices]
        self._starts, size_bytes = plan_places(slices)
        self.bytes = torch.zeros(size_bytes, dtype=torch.uint8)
        self.tensors = [self._view(number) for number in range(len(slices))]

    def _view(self, number: int) -> torch.Tensor:
        part, dtype, start = self.slices[number], self._dtypes[number], self._starts[number]
        stop = start + math.prod(part.sizes) * dtype.itemsize
        return self.bytes[start:stop].view(dtype).reshape(part.sizes)

    def plan(self, parts: int, least_bytes: int) -> list[list[Rows]]:
        """The shares of so many readers."""
        sizes = [part.sizes for part in self.slices]
        items = [dtype.itemsize for dtype in self._dtypes]
        return plan_shares(sizes, items, parts, least_bytes=least_bytes)

    def target(self, rows: Rows) -> tuple[Box, torch.Tensor]:
        """A part of a share: its box of the full tensor, and where it belongs here."""
        part, tensor = self.slices[rows.box], self.tensors[rows.box]
        if not part.sizes:
            return part.box, tensor
        offsets = (part.offsets[0] + rows.first, *part.offsets[1:])
        box = Box(part.name, offsets, (rows.rows, *part.sizes[1:]))
        return box, tensor[rows.first : rows.first + rows.rows]

    def buffers(self, share: Sequence[Rows]) -> Iterator[torch.Tensor]:
        """The bytes of a share, which lie together, in pieces to be sent."""
        if share:
            first, last = self.target(share[0])[1], self.target(share[-1])[1]
            start = first.storage_offset() * first.itemsize
            stop = last.storage_offset() * last.itemsize + last.nbytes
            yield from self.bytes[start:stop].split(BUFFER_BYTES)

    def checksum(self) -> int:
        """A number that one changed bit changes."""
        return int(self.bytes.view(torch.int64).sum()) if len(self.bytes) else 0


class _Part:
    """One worker's side of `read_together`."""

    def __init__(
        self,
        engine: Engine,
        cross: CrossGroup,
        open_saved: Callable[[], Saved],
        least_bytes: int,
    ) -> None:
        self._cross, self._open, self._device = cross, open_saved, engine.device
        self._staging = Staging(engine.state.to_read())
        self._shares = self._staging.plan(cross.size, least_bytes)
        self._saved: Saved | None = None
        self._mine: Sequence[int | None] = (None, None)
        self._numbers = (0, 0)
        self.unreadable = False
        self.error: CheckpointError | None = None
        self.mark = 0
        """Tells the record that these workers have opened from others; 0: none was read."""

    def get(self) -> None:
        """Fills the staging, or notes that it cannot be done.

        Raises:
            CrossGroupLost: a peer is gone, or this worker is called away.
        """
        cross = self._cross
        read = self._votes(self._read([cross.rank]))
        readers = plan_readers(read)
        if not all(read) and not self.unreadable:
            second = [p for p, reader in enumerate(readers) if not read[p] and reader == cross.rank]
            # A replica that is alone has nobody else to ask.
            had = cross.size > 1 and (not second or self._read(second))
            self.unreadable = not all(self._votes(had)) or self.unreadable
        if self.unreadable:
            return
        self.error = None  # another worker has read what this one could not
        self._numbers = self._training_state()
        self._hand_round(readers)
        self._compare()

    def restored(self) -> Restored:
        """What `get` has got."""
        staging = self._staging
        values = {p.name: t for p, t in zip(staging.slices, staging.tensors, strict=True)}
        steps, skipped = self._numbers
        return Restored(values=values, optimizer_steps=steps, skipped_in_a_row=skipped)

    def refuse(self) -> None:
        """Notes that not all workers have opened the same record."""
        self.unreadable = True
        if self._sha256 is not None and self._saved is not None:
            self.error = OtherRecordError(self._saved[0].manifest.step, self._sha256)

    @property
    def _sha256(self) -> str | None:
        """Of the record that this worker has read; the coordinator hands out those of snapshots."""
        return None if self._saved is None else self._saved[0].manifest.read_sha256

    def _votes(self, read: bool) -> list[bool]:
        mine = int((self._sha256 or "0")[:_MARK_DIGITS], 16)
        told = [vote or 0 for vote in self._cross.gather_numbers(2 * mine + read)]
        marks = {vote // 2 for vote in told} - {0}
        self.mark = max(marks, default=0)
        if len(marks) > 1:
            self.refuse()
        return [vote % 2 == 1 for vote in told]

    def _read(self, positions: Sequence[int]) -> bool:
        """Reads the shares of `positions`. Returns whether that went well."""
        try:
            if self._saved is None:
                saved = self._open()
                self._mine = numbers_of(saved[0].manifest.step, saved[1])
                self._saved = saved
            for position in positions:
                for batch in self._batches(self._shares[position]):
                    self._cross.listen()
                    boxes, tensors = zip(*batch, strict=True)
                    self._saved[0].read_many(boxes, into=tensors)
        except CheckpointError as error:
            self.error = error
            return False
        return True

    def _batches(self, share: Sequence[Rows]) -> Iterator[list[tuple[Box, torch.Tensor]]]:
        targets = [self._staging.target(rows) for rows in share]
        for members in pack([tensor.nbytes for _, tensor in targets], _BATCH_BYTES):
            yield [targets[member] for member in members]

    def _training_state(self) -> tuple[int, int]:
        """Who could not open the saved state has it from the others."""
        told = [self._cross.gather_numbers(number) for number in self._mine]
        steps, skipped = (max(n for n in numbers if n is not None) for numbers in told)
        return steps, skipped

    def _hand_round(self, readers: Sequence[int]) -> None:
        if self._cross.size == 1:
            return
        for position, reader in enumerate(readers):
            for piece in self._staging.buffers(self._shares[position]):
                buffer = piece.to(self._device)
                self._cross.hear(buffer, reader)
                if buffer is not piece:
                    piece.copy_(buffer)

    def _compare(self) -> None:
        """What travelled has no CRC any more. Equal faults on the way are not to be expected."""
        sums = self._cross.gather_numbers(self._staging.checksum())
        if len(set(sums)) > 1:
            raise CrossGroupLost(f"the copies that were handed round differ: checksums {sums}")


def plan_readers(read: Sequence[bool]) -> list[int]:
    """Who hands each share round: its own reader, or else the next that could read its own; if
    there is none, the next."""
    size = len(read)
    readers = []
    for position, good in enumerate(read):
        others = [(position + n) % size for n in range(1, size)]
        second = next((p for p in others if read[p]), (position + 1) % size)
        readers.append(position if good else second)
    return readers
