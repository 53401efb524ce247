"""State from elsewhere, piece by piece, as a committed checkpoint that a run goes on from."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from checkpointing import (
    AlreadyCommittedError,
    Keys,
    Manifest,
    NotCommittedError,
    Receipt,
    SliceError,
    StaleGenerationError,
    Store,
    StoreError,
    TensorSlice,
    claim_for_import,
    commit,
    list_steps,
    newest,
    write_slices,
)
from checkpointing.format.boxes import Index
from checkpointing.format.cutting import pack
from checkpointing.format.dtypes import item_bytes
from checkpointing.format.layout import SEGMENT_BYTES
from checkpointing.format.segment import slice_bytes
from trainer.errors import ExchangeError
from trainer.exchange.pieces import pieces_of

_WIDENED = {"bfloat16": "float32", "float16": "float32"}
"""Element types that float32 holds exactly; trainable parameters are kept in float32."""

_BEFORE_THE_RECORD = (SliceError, NotCommittedError, StaleGenerationError)
"""What `commit` raises before it writes the record."""


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """A part of a tensor that is read when its turn comes."""

    part: TensorSlice
    """What it is in the checkpoint."""
    read: Callable[[], torch.Tensor]
    """Its values, in any element type that the part's holds exactly."""


def stored_dtype(dtype: str) -> str:
    """The element type in which values of `dtype` are kept in a checkpoint."""
    return _WIDENED.get(dtype, dtype)


def fresh_moments(name: str, shape: Index, moments: Sequence[str]) -> Iterator[Incoming]:
    """An optimizer's moments before its first step, for parameter `name`."""
    for moment in moments:
        if 0 in shape:
            yield _zeros(f"{moment}/{name}", shape, (0,) * len(shape), shape)
        for box in pieces_of(f"{moment}/{name}", shape, item_bytes("float32")):
            yield _zeros(box.name, shape, box.offsets, box.sizes)


def _zeros(name: str, shape: Index, offsets: Index, sizes: Index) -> Incoming:
    part = TensorSlice(name, shape, "float32", offsets, sizes)
    return Incoming(part=part, read=lambda: torch.zeros(sizes))


def commit_incoming(
    store: Store,
    keys: Keys,
    incoming: Iterable[Incoming],
    *,
    step: int,
    training_state: Mapping[str, Any],
    segment_bytes: int = SEGMENT_BYTES,
) -> Manifest:
    """Writes what comes in as the checkpoint of `step` and commits it. One process calls it.

    About a segment is in memory at a time. Killed before the end it leaves no checkpoint; where it
    fails, it takes what it wrote with it. Another import, and a run that goes on in the same store,
    do no harm: see `checkpointing/retention/claims.py`.

    Args:
        store: where to.
        keys: names in the store.
        incoming: parts that tile their tensors.
        step: step that the state belongs to; at 0 a run would start from its seed.
        training_state: what is known of the run that made it; added to what a restore needs.
        segment_bytes: bound on the tensor bytes in one file.

    Raises:
        ExchangeError: step 0.
        CheckpointError: the step is taken, the parts do not tile, or the store refuses.
    """
    if step < 1:
        raise ExchangeError(f"step {step}", "a run begins step 0 from its seed", "Use 1 or more")
    with claim_for_import(store, keys, step) as still_ours:
        if step in list_steps(store, keys):
            raise AlreadyCommittedError(step, f"there is {keys.commit(step)}")
        last = newest(store, keys)
        generation = 0 if last is None else last.generation
        attempt, receipts, committing = secrets.randbits(31), list[Receipt](), False
        try:
            for receipt in _write(store, keys, incoming, step, generation, attempt, segment_bytes):
                receipts.append(receipt)
            still_ours()
            committing = True
            return commit(
                store,
                keys,
                step=step,
                generation=generation,
                receipts=receipts,
                training_state={"step": step, "skipped_in_a_row": 0, **training_state},
                versions={name: version(name) for name in ("torch", "safetensors")},
            )
        except BaseException as error:
            # After any other error of a commit the record may be there.
            if not committing or isinstance(error, _BEFORE_THE_RECORD):
                under_way = keys.attempt(len(receipts), step, generation, attempt)
                _delete(store, receipts, under_way)
            raise


def _write(
    store: Store,
    keys: Keys,
    incoming: Iterable[Incoming],
    step: int,
    generation: int,
    attempt: int,
    segment_bytes: int,
) -> Iterator[Receipt]:
    items = list(incoming)
    batches = pack([slice_bytes(item.part) for item in items], segment_bytes)
    for number, batch in enumerate(batches):
        yield write_slices(
            store,
            keys,
            rank=number,
            step=step,
            generation=generation,
            attempt=attempt,
            slices=[(items[one].part, _as_dtype(items[one])) for one in batch],
            segment_bytes=segment_bytes,
        )


def _delete(store: Store, receipts: Iterable[Receipt], under_way: str) -> None:
    """Deletes segments that no record refers to: those of `receipts`, and of the one after them."""
    written = [segment.key for receipt in receipts for segment in receipt.segments]
    with contextlib.suppress(StoreError):  # then a start of the run does
        store.delete_many(written)
        store.delete_many(store.list(under_way))


def _as_dtype(item: Incoming) -> torch.Tensor:
    return item.read().to(getattr(torch, item.part.dtype)).reshape(item.part.sizes)
