"""What a worker hands to the uploader of its node, and how it reaches a snapshot on other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from checkpointing import Attempt, KnownPart, Manifest, TensorSlice, Written
from elastic.protocol.rpc import Remote
from trainer.replication.step_commit import Place


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A worker's part of a save, ready to be written."""

    place: Place
    """Where to."""
    pid: int
    """Process that holds the copy."""
    fd: int
    """Descriptor of the buffer in that process."""
    number: int
    """Of the copy in it."""
    attempt: Attempt
    """Who writes what."""
    writers: int
    """Parts of this save."""
    slices: tuple[TensorSlice, ...]
    """What is in the copy, placed as `plan_places` has it."""
    still: frozenset[str] = frozenset()
    """Names of tensors that training does not change."""
    known: Mapping[TensorSlice, KnownPart] = field(default_factory=dict)
    """What this worker's parts of the newest committed checkpoint were."""
    training_state: dict[str, Any]
    """What lies beside the tensors."""
    begun_at: float
    """When it was copied, in seconds since the epoch."""


class UploaderApi(Protocol):
    """What workers ask of their node's uploader (`elastic/node/uploader.py`)."""

    def write(self, upload: Upload) -> Written | None:
        """Writes a part and hands in its receipt. Doing it twice does no harm; asked a second time
        while it is at it, as by a worker whose connection broke, it does it once: the worker uses
        its buffer again when one of its calls has ended.

        Returns:
            What was written; None where it could not be, which the coordinator knows, or where the
            copy is gone.
        """


class HolderApi(Protocol):
    """What workers, and other holders, ask of a snapshot holder (`elastic/node/snapshot_holder.py`)
    on another node."""

    def read(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes of a segment. Raises MissingError."""


@dataclass(frozen=True, kw_only=True)
class HeldSnapshot:
    """A snapshot and how to reach it; a worker gets it from the coordinator."""

    manifest: Manifest
    """What it holds."""
    holders: Mapping[str, Mapping[str, Remote[HolderApi]]]
    """Segment key -> node -> its holder."""
