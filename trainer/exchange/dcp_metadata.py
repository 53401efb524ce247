"""Reads the `.metadata` of a torch.distributed.checkpoint directory without running any of it.

That file is a pickle, and a pickle can call any function of any module. Here it can call none: an
unpickler that knows the names of DCP's own metadata classes puts stand-ins in their place, which
keep what they are given and do nothing, and refuses every other name. The stand-ins are made anew
for each file, so that nothing a file does to them outlives it. What they hold is then checked and
taken over as plain data. This is the only pickle that this project reads from storage, and only
`import --from dcp` does so.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.format.boxes import Index
from checkpointing.format.dtypes import DTYPES
from trainer.errors import ExchangeError

METADATA = ".metadata"

_CLASSES = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    }
)
_DTYPES = frozenset({*DTYPES, "complex128"})


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """Where an entry lies."""

    file: str
    """Name of the file, relative to the directory."""
    offset: int
    """First byte."""
    length: int
    """Number of bytes."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor and its chunks."""

    shape: Index
    """Global shape."""
    dtype: str
    """torch's name without `torch.`."""
    chunks: tuple[tuple[Index, Index, StoredBytes], ...]
    """(offsets, sizes, where) of each part."""


@dataclass(frozen=True, kw_only=True)
class DcpMetadata:
    """What a DCP directory says it holds."""

    tensors: Mapping[str, StoredTensor]
    """By flat name."""
    objects: Mapping[str, StoredBytes]
    """Everything else, by flat name; each is a `torch.save` of some value."""
    paths: Mapping[str, tuple[str, ...]]
    """Flat name -> the keys of the nested dictionaries that it was saved from."""


def read_metadata(directory: Path) -> DcpMetadata:
    """The metadata of a DCP checkpoint.

    Raises:
        ExchangeError: there is none, it names anything that DCP's own does not, or it does not
            hold together.
    """
    file = directory / METADATA
    try:
        with file.open("rb") as stream:
            found = _Unpickler(stream, str(file)).load()
    except OSError as error:
        raise ExchangeError(
            str(file),
            f"it cannot be read ({error.strerror})",
            "Name a directory that DCP has written",
        ) from error
    except ExchangeError:
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise _unusable(file, f"{type(error).__name__}: {error}") from error
    try:
        return _take_over(found)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise _unusable(file, f"{type(error).__name__}: {error}") from error


def _unusable(file: Path, fact: str) -> ExchangeError:
    return ExchangeError(
        str(file), f"not the metadata of a DCP checkpoint ({fact})", "Save it again with torch 2.x"
    )


class _Inert:
    """Stands in for a class: keeps its arguments and its state."""

    def __init__(self, *args: object) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Gives stand-ins for DCP's metadata classes, and nothing else."""

    def __init__(self, stream: Any, where: str) -> None:
        super().__init__(stream)
        self._where = where
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return name
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if _is_plain(module, name):
            return self._classes.setdefault(name, type(name, (_Inert,), {}))
        raise ExchangeError(
            self._where,
            f"it names {module}.{name}, which the metadata of a DCP checkpoint has no use for; "
            f"nothing of it was run",
            "Do not load this file with anything that unpickles it",
        )


def _is_plain(module: str, name: str) -> bool:
    return (
        (module == "torch.distributed.checkpoint.metadata" and name in _CLASSES)
        or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        or (module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath"))
    )


def _take_over(found: Any) -> DcpMetadata:
    stored = {
        (index.state["fqn"], _index(index.state.get("offset"))): _stored_bytes(info)
        for index, info in found.state["storage_data"].items()
    }
    entries: dict[str, Any] = found.state["state_dict_metadata"]
    tensors, objects = {}, {}
    for name, entry in entries.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            tensors[str(name)] = _stored_tensor(name, entry.state, stored)
        else:
            objects[str(name)] = stored[name, None]
    planned: dict[str, Any] = found.state.get("planner_data") or {}
    paths = {
        str(name): tuple(map(str, path))
        for name, path in planned.items()
        if isinstance(path, tuple)
    }
    return DcpMetadata(tensors=tensors, objects=objects, paths=paths)


def _stored_tensor(name: str, state: Any, stored: Mapping[Any, StoredBytes]) -> StoredTensor:
    properties = state["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is of type {dtype!r}")
    chunks = []
    for chunk in state["chunks"]:
        offsets, sizes = _index(chunk.state["offsets"]), _index(chunk.state["sizes"])
        assert offsets is not None and sizes is not None
        chunks.append((offsets, sizes, stored[name, offsets]))
    shape = _index(state["size"])
    assert shape is not None
    return StoredTensor(shape=shape, dtype=dtype, chunks=tuple(chunks))


def _stored_bytes(info: Any) -> StoredBytes:
    state = info.state
    if state.get("transform_descriptors"):
        raise ValueError(f"entries are transformed by {state['transform_descriptors']}")
    file, offset, length = state["relative_path"], int(state["offset"]), int(state["length"])
    if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
        raise ValueError(f"an entry lies at {file!r}, outside of the directory")
    return StoredBytes(file=file, offset=offset, length=length)


def _index(value: Any) -> Index | None:
    return None if value is None else tuple(int(number) for number in value)
