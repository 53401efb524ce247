"""The commit record: what a checkpoint holds and where every byte of it lies.

A manifest is a JSON object whose last member, `sha256`, is the hash of everything before it, so
that any change to it is seen. Segments are listed once and slices point to them by number. A
`Receipt` is one writer's share of it, and travels to whoever commits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from checkpointing.errors import CorruptError
from checkpointing.format.boxes import Index, TensorInfo

SCHEMA = 3
"""Version of the manifest's form; a reader refuses one that it does not know."""

_UNKEYED_SCHEMA = 2
"""Of a manifest none of whose segments is keyed: as an earlier version wrote it, byte for byte."""

_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SEAL_BYTES = len(b',"sha256":""}') + 64


@dataclass(frozen=True, kw_only=True)
class CrcTable:
    """Where a segment has the CRC32s of its pieces: from `begin` to its end."""

    begin: int
    """First byte of the table, and end of the bytes that it is about."""
    piece_bytes: int
    """Bytes under one CRC; divides the segment's `block_bytes`."""
    crc32: int
    """CRC32 of the table's own bytes."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A file with the bytes of some slices."""

    key: str
    """Its key in the store."""
    size_bytes: int
    """Its whole size, header and table included."""
    block_bytes: int
    """Bytes under one CRC."""
    crcs: tuple[int, ...]
    """CRC32 of each block up to `checked_bytes`; the last block may be short."""
    table: CrcTable | None = None
    """For reads of less than a block; None where it has none."""
    keyed: bool = False
    """Whether all its CRC32s begin at that of its key, and blocks end before its table. Segments of
    earlier versions are not, and a later checkpoint may refer to them."""

    @property
    def checked_bytes(self) -> int:
        """Bytes from the beginning that are under CRCs of blocks."""
        return self.table.begin if self.keyed and self.table else self.size_bytes


@dataclass(frozen=True, kw_only=True)
class SavedSlice:
    """A part of a tensor and where its bytes lie, in row-major order."""

    name: str
    """The tensor's name."""
    offsets: Index
    """First index of the part in every dimension."""
    sizes: Index
    """Extent of the part in every dimension."""
    segment: str
    """Key of the segment."""
    begin: int
    """First byte within the segment's file."""
    end: int
    """Behind its last byte."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What one rank has written durably for one attempt at a checkpoint."""

    rank: int
    """The writer's number among the writers."""
    step: int
    """The step that the state belongs to."""
    generation: int
    """The roster that the writer worked under."""
    attempt: int
    """Tells tries at this step in this generation apart; a run draws a number at each start."""
    tensors: Mapping[str, TensorInfo]
    """Every tensor that the rank was handed a part of, empty parts included."""
    slices: tuple[SavedSlice, ...]
    """What it wrote."""
    segments: tuple[Segment, ...]
    """Where it wrote that."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Receipt:
        """The inverse of `to_dict`, also after a way through JSON."""
        numbers = {name: data[name] for name in ("rank", "step", "generation", "attempt")}
        return cls(
            **numbers,
            tensors={name: _info(*value) for name, value in data["tensors"].items()},
            slices=tuple(
                SavedSlice(**{**s, "offsets": tuple(s["offsets"]), "sizes": tuple(s["sizes"])})
                for s in data["slices"]
            ),
            segments=tuple(map(_segment, data["segments"])),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed checkpoint."""

    step: int
    """The step that the state belongs to."""
    generation: int
    """The roster that wrote it."""
    attempt: int
    """Tells tries at this step in this generation apart; a run draws a number at each start."""
    tensors: Mapping[str, TensorInfo]
    """Every tensor, by name: this table is the model's fingerprint."""
    slices: Mapping[str, tuple[SavedSlice, ...]]
    """For each tensor the parts that tile it; none for one without elements."""
    segments: Mapping[str, Segment]
    """Every file, by key."""
    training_state: Mapping[str, Any]
    """What the trainer wants back besides tensors; JSON values."""
    versions: Mapping[str, str]
    """Versions of the libraries that wrote it."""
    committed_at: float | None = None
    """When it was committed, in seconds since 1970 by the committer's clock; None where it was not
    recorded. For people: nothing is decided by it."""

    def to_bytes(self) -> bytes:
        """The record as stored; equal manifests have equal bytes."""
        numbers = {key: number for number, key in enumerate(sorted(self.segments))}
        keyed = any(segment.keyed for segment in self.segments.values())
        body = {
            "schema": SCHEMA if keyed else _UNKEYED_SCHEMA,
            "step": self.step,
            "generation": self.generation,
            "attempt": self.attempt,
            "training_state": self.training_state,
            "versions": self.versions,
            "committed_at": self.committed_at,
            "segments": [_fields(self.segments[key], keyed) for key in numbers],
            "tensors": {
                name: {
                    "shape": info.shape,
                    "dtype": info.dtype,
                    "slices": [_row(part, numbers) for part in self.slices.get(name, ())],
                }
                for name, info in self.tensors.items()
            },
        }
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        seal = hashlib.sha256(text[:-1]).hexdigest()
        return text[:-1] + f',"sha256":"{seal}"}}'.encode()

    @classmethod
    def from_bytes(cls, raw: bytes, key: str) -> Manifest:
        """The inverse of `to_bytes`.

        Raises:
            CorruptError: not a manifest, of an unknown schema, or changed since it was written.
        """
        try:
            body = json.loads(raw)
            schema = body["schema"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptError(key, f"{len(raw)} bytes that are not a manifest ({error})") from None
        if schema not in (_UNKEYED_SCHEMA, SCHEMA):
            known = f"{_UNKEYED_SCHEMA} and {SCHEMA}"
            raise CorruptError(key, f"schema {schema!r}, and this version knows {known} only")
        seal = _SEAL.fullmatch(raw[-_SEAL_BYTES:])
        if not seal or hashlib.sha256(raw[:-_SEAL_BYTES]).hexdigest() != seal[1].decode():
            raise CorruptError(
                key, "the manifest has changed since it was written (sha256 differs)"
            )
        return _from_body(body)


def is_sound(raw: bytes) -> bool:
    """Whether a record is whole: a manifest, or one of a schema that this version does not know."""
    try:
        Manifest.from_bytes(raw, "")
        return True
    except CorruptError:
        pass
    try:
        schema = json.loads(raw)["schema"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return isinstance(schema, int) and schema not in (_UNKEYED_SCHEMA, SCHEMA)


def _from_body(body: Mapping[str, Any]) -> Manifest:
    segments = [_segment(s) for s in body["segments"]]
    tables: dict[str, Any] = body["tensors"]
    return Manifest(
        step=body["step"],
        generation=body["generation"],
        attempt=body["attempt"],
        tensors={name: _info(t["shape"], t["dtype"]) for name, t in tables.items()},
        slices={
            name: tuple(
                SavedSlice(
                    name=name,
                    offsets=tuple(offsets),
                    sizes=tuple(sizes),
                    segment=segments[number].key,
                    begin=begin,
                    end=end,
                )
                for offsets, sizes, number, begin, end in t["slices"]
            )
            for name, t in tables.items()
        },
        segments={segment.key: segment for segment in segments},
        training_state=body["training_state"],
        versions=body["versions"],
        committed_at=body.get("committed_at"),
    )


def _row(part: SavedSlice, numbers: Mapping[str, int]) -> list[Any]:
    return [part.offsets, part.sizes, numbers[part.segment], part.begin, part.end]


def _fields(segment: Segment, keyed: bool) -> dict[str, Any]:
    fields = asdict(segment)
    if not keyed:
        del fields["keyed"]
    return fields


def _segment(data: Mapping[str, Any]) -> Segment:
    table = None if data["table"] is None else CrcTable(**data["table"])
    return Segment(**{**data, "crcs": tuple(data["crcs"]), "table": table})


def _info(shape: list[int], dtype: str) -> TensorInfo:
    return TensorInfo(tuple(shape), dtype)
