"""The commit record: what a checkpoint holds and where every byte of it lies.

A manifest is a JSON object whose last member, `sha256`, is the hash of everything before it, so
that any change to it is seen. Tensors and segments are listed once; slices are columns of numbers,
which point to them (`slices.py`). A `Receipt` is one writer's share of it, and travels to whoever
commits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from checkpointing.errors import CorruptError, SliceError
from checkpointing.format.boxes import TensorInfo
from checkpointing.format.dtypes import DTYPES
from checkpointing.format.layout import table_bytes
from checkpointing.format.slices import SavedSlice, SliceTable, join

SCHEMA = 3
"""Version of the manifest's form."""

_MOST_BYTES = 1 << 62
"""Of a tensor, so that no sum of places overflows."""

_OTHER_VERSION = "Read it with the version that wrote it"

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
    slices: SliceTable
    """What it wrote, of every tensor that the rank was handed a part of: empty parts count."""
    segments: tuple[Segment, ...]
    """Where it wrote that."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            **{name: getattr(self, name) for name in _RECEIPT_NUMBERS},
            "tensors": list(zip(self.slices.names, self.slices.infos, strict=True)),
            "slices": self.slices.to_json(),
            "segments": [_plain(segment) for segment in self.segments],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Receipt:
        """The inverse of `to_dict`, also after a way through JSON."""
        tensors = _shared(tuple((name, _info(*info)) for name, info in data["tensors"]))
        segments = tuple(map(_segment, data["segments"]))
        keys = [segment.key for segment in segments]
        return cls(
            **{name: data[name] for name in _RECEIPT_NUMBERS},
            slices=SliceTable.from_json(data["slices"], dict(tensors), keys),
            segments=segments,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Receipt.from_dict, (self.to_dict(),)


_RECEIPT_NUMBERS = ("rank", "step", "generation", "attempt")

_KEPT_TABLES = 64


@functools.lru_cache(maxsize=_KEPT_TABLES)
def _shared(
    tensors: tuple[tuple[str, TensorInfo], ...],
) -> tuple[tuple[str, TensorInfo], ...]:
    """The first of equal tables: writers of a layout have the same, and who commits holds all."""
    return tensors


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed checkpoint."""

    step: int
    """The step that the state belongs to."""
    generation: int
    """The roster that wrote it."""
    attempt: int
    """Tells tries at this step in this generation apart; a run draws a number at each start."""
    slices: SliceTable
    """The parts that tile the tensors, by tensor and then by their place in it; none of a tensor
    without elements."""
    segments: Mapping[str, Segment]
    """Every file, by key."""
    training_state: Mapping[str, Any]
    """What the trainer wants back besides tensors; JSON values."""
    versions: Mapping[str, str]
    """Versions of the libraries that wrote it."""
    committed_at: float | None = None
    """When it was committed, in seconds since 1970 by the committer's clock; None where it was not
    recorded. For people: nothing is decided by it."""
    read_sha256: str | None = field(default=None, compare=False)
    """`sha256`, where it was read: an older version's record has other bytes than `to_bytes`."""

    @functools.cached_property
    def sha256(self) -> str:
        """Of the record as stored."""
        return self.read_sha256 or hashlib.sha256(self.to_bytes()).hexdigest()

    @functools.cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by name: this table is the model's fingerprint."""
        return dict(zip(self.slices.names, self.slices.infos, strict=True))

    def parts_of(self, name: str) -> SliceTable:
        """The slices of a tensor of the checkpoint."""
        return self.slices[self._places[name]]

    @functools.cached_property
    def _places(self) -> Mapping[str, slice]:
        return dict(zip(self.slices.names, self.slices.by_tensor(), strict=True))

    def to_bytes(self) -> bytes:
        """The record as stored; equal manifests have equal bytes. Made once: each worker of a
        restore is sent it."""
        return self._record

    @functools.cached_property
    def _record(self) -> bytes:
        body = {
            "schema": SCHEMA,
            "step": self.step,
            "generation": self.generation,
            "attempt": self.attempt,
            "training_state": self.training_state,
            "versions": self.versions,
            "committed_at": self.committed_at,
            "segments": [_plain(self.segments[key]) for key in self.slices.keys],
            "tensors": list(zip(self.slices.names, self.slices.infos, strict=True)),
            "slices": self.slices.to_json(),
        }
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        seal = hashlib.sha256(text[:-1]).hexdigest()
        return text[:-1] + f',"sha256":"{seal}"}}'.encode()

    @classmethod
    def from_bytes(cls, raw: bytes, key: str) -> Manifest:
        """The inverse of `to_bytes`, also of those of the schema before.

        Raises:
            CorruptError: not a manifest, of an unknown schema, changed since it was written, or
                written wrong or by a later version: what it says does not fit together.
        """
        body = _parse(raw, key)
        if body["schema"] not in _READERS:
            known = " and ".join(map(str, _READERS))
            raise CorruptError(
                key,
                f"schema {body['schema']!r}; this version knows {known} only. {_OTHER_VERSION}",
            )
        if not _is_sealed(raw):
            raise CorruptError(
                key, "the manifest has changed since it was written (sha256 differs)"
            )
        try:
            return _from_body(body, hashlib.sha256(raw).hexdigest())
        except (LookupError, TypeError, ValueError, ArithmeticError, SliceError) as error:
            fact = (
                f"a manifest of schema {body['schema']} that was written wrong, or by a later "
                f"version ({type(error).__name__}: {error}); it names "
                f"{reprlib.repr(body.get('versions'))}. {_OTHER_VERSION}"
            )
            raise CorruptError(key, fact) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest.from_bytes, (self.to_bytes(), "a manifest on its way")


def is_sound(raw: bytes) -> bool:
    """Whether a record is whole, though this version may not read it: nothing of it has changed
    since it was sealed, or it is of a schema that this version does not know, nor its seal."""
    if _is_sealed(raw):
        return True
    try:
        return _parse(raw, "")["schema"] not in _READERS
    except CorruptError:
        return False


def _is_sealed(raw: bytes) -> bool:
    seal = _SEAL.fullmatch(raw[-_SEAL_BYTES:])
    if seal is None:
        return False
    return hashlib.sha256(raw[:-_SEAL_BYTES]).hexdigest() == seal[1].decode()


def _parse(raw: bytes, key: str) -> dict[str, Any]:
    """An object with the number of a schema."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
        if type(body["schema"]) is not int:
            raise ValueError(f"schema {body['schema']!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(key, f"{len(raw)} bytes that are not a manifest ({error})") from None
    found: dict[str, Any] = body
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _from_body(body: Mapping[str, Any], sha256: str) -> Manifest:
    """Raises one of Python's errors, or SliceError, where what it says does not fit together."""
    segments = {segment.key: segment for segment in map(_segment, body["segments"])}
    if len(segments) != len(body["segments"]):
        raise ValueError("two segments have one key")
    slices = _READERS[body["schema"]](body, list(segments))
    _check_places(slices, tuple(segments.values()))
    return Manifest(
        step=_whole(body["step"]),
        generation=_whole(body["generation"]),
        attempt=_whole(body["attempt"]),
        slices=slices,
        segments=segments,
        training_state=_mapping(body["training_state"]),
        versions={name: _text(version) for name, version in _mapping(body["versions"]).items()},
        committed_at=None if (at := body.get("committed_at")) is None else float(at),
        read_sha256=sha256,
    )


def _columns(body: Mapping[str, Any], keys: list[str]) -> SliceTable:
    """The slices of a manifest of this schema."""
    tensors = {_text(name): _info(*info) for name, info in body["tensors"]}
    return SliceTable.from_json(body["slices"], tensors, keys)


def _rows(body: Mapping[str, Any], keys: list[str]) -> SliceTable:
    """The slices of a manifest of the schema before, where each was a row of its tensor."""
    tables = _mapping(body["tensors"])
    tensors = {name: _info(table["shape"], table["dtype"]) for name, table in tables.items()}
    parts = [
        SavedSlice(
            name=name,
            offsets=tuple(map(_whole, offsets)),
            sizes=tuple(map(_whole, sizes)),
            segment=keys[_whole(number)],
            begin=_whole(begin),
            end=_whole(end),
        )
        for name, table in tables.items()
        for offsets, sizes, number, begin, end in table["slices"]
    ]
    slices = SliceTable.of(parts, tensors, keys)
    if [part.end for part in slices] != [part.end for part in parts]:
        raise ValueError("a slice has not the bytes that its shape needs")
    return join([slices], tensors)


_READERS = {2: _rows, SCHEMA: _columns}
"""Schema -> what reads the slices of such a manifest."""


def _check_places(slices: SliceTable, segments: Sequence[Segment]) -> None:
    """Raises ValueError unless each slice lies before the end of its segment's tensors."""
    ends = np.array([s.table.begin if s.table else s.size_bytes for s in segments], dtype=np.int64)
    past = slices.begin > ends[slices.segment] - slices.size_bytes()
    if past.any():
        part = slices[int(np.argmax(past))]
        raise ValueError(
            f"bytes {part.begin} to {part.end} of {part.segment} are past the end of its tensors"
        )


def run_of(manifest: Manifest) -> str | None:
    """The id of the run that wrote a checkpoint, where it says so."""
    run = manifest.training_state.get("run")
    return run.get("id") if isinstance(run, Mapping) else None


def _plain(segment: Segment) -> dict[str, Any]:
    """As JSON values. `asdict` would copy each CRC: seconds at thousands of segments."""
    return {**vars(segment), "table": None if segment.table is None else vars(segment.table)}


def _segment(data: Mapping[str, Any]) -> Segment:
    size, block = _whole(data["size_bytes"]), _whole(data["block_bytes"], least=1)
    segment = Segment(
        key=_text(data["key"]),
        size_bytes=size,
        block_bytes=block,
        crcs=tuple(map(_crc, data["crcs"])),
        table=None if data["table"] is None else _table(data["table"], size, block),
        keyed=_flag(data.get("keyed", False)),
    )
    count, checked = len(segment.crcs), segment.checked_bytes
    if count != -(-checked // block):
        raise ValueError(f"{count} CRCs for {checked} bytes in blocks of {block}")
    return segment


def _table(data: Mapping[str, Any], size_bytes: int, block_bytes: int) -> CrcTable:
    begin, piece_bytes = _whole(data["begin"]), _whole(data["piece_bytes"], least=1)
    if block_bytes % piece_bytes or begin + table_bytes(begin, piece_bytes) != size_bytes:
        raise ValueError(
            f"a table from byte {begin} to {size_bytes}, of pieces of {piece_bytes} bytes in "
            f"blocks of {block_bytes}"
        )
    return CrcTable(begin=begin, piece_bytes=piece_bytes, crc32=_crc(data["crc32"]))


def _info(shape: list[int], dtype: str) -> TensorInfo:
    info = TensorInfo(tuple(map(_whole, shape)), dtype)
    if math.prod(info.shape) * DTYPES[dtype].item_bytes > _MOST_BYTES:
        raise ValueError(f"a tensor of shape {info.shape}")
    return info


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} where a whole number from {least} on belongs")
    return value


def _crc(value: Any) -> int:
    if _whole(value) >> 32:
        raise ValueError(f"{value} is no CRC32")
    return int(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} where true or false belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a text belongs")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} where an object belongs")
    return value
