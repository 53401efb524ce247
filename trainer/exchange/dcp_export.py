"""A checkpoint as torch.distributed.checkpoint (DCP) writes it, under torchtitan's names.

    {fqn}                                    the weights, at the top level
    optimizer.state.{fqn}.{moment}, .step    the moments by their names, such as exp_avg
    optimizer.param_groups.{fqn}.lr, .betas, …   of AdamW, where the checkpoint says which they are
    train_state.step

DCP's own writer keeps all that it has written in memory until the end. So the files are written
here: each entry a `torch.save`, one behind the other, and last `.metadata`, which is a pickle
because DCP reads nothing else. Of tied parameters both names point at the same bytes.
Source: torch 2.13, distributed/checkpoint/filesystem.py; torchtitan, components/checkpoint.py
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing import Box, Reader
from checkpointing.format.dtypes import item_bytes
from trainer.config import OptimizerConfig
from trainer.engine.names import PARAMETERS
from trainer.exchange.dcp_metadata import METADATA
from trainer.exchange.pieces import (
    finished_directory,
    model_config,
    moment_names,
    parameter_names,
    pieces_of,
)
from trainer.models.hf import build_on_meta

_FILE_BYTES = 4 << 30
"""A data file that has reached this size gets a successor."""


@dataclass(kw_only=True)
class _Writer:
    """Appends entries to data files, and remembers where they lie."""

    directory: Path
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    stored: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _number: int = -1
    _file: BinaryIO | None = None

    def tensor(self, path: tuple[str, ...], reader: Reader, name: str) -> None:
        """Copies a tensor of the checkpoint, a piece at a time."""
        shape, dtype = reader.manifest.tensors[name]
        boxes = list(pieces_of(name, shape, item_bytes(dtype))) or [
            Box(name, (0,) * len(shape), shape)
        ]
        placed = []
        for _, offsets, sizes in boxes:
            place = self._append(reader.read(name, offsets, sizes))
            placed.append((torch.Size(offsets), torch.Size(sizes), place))
        self._declare(path, torch.Size(shape), getattr(torch, dtype), placed)

    def scalar(self, paths: Sequence[tuple[str, ...]], value: torch.Tensor) -> None:
        """Writes one 0-d tensor under several names."""
        empty, place = torch.Size(()), self._append(value)
        for path in paths:
            self._declare(path, empty, value.dtype, [(empty, empty, place)])

    def value(self, paths: Sequence[tuple[str, ...]], value: object) -> None:
        """Writes one plain value under several names."""
        place = self._append(value)
        for path in paths:
            name = ".".join(path)
            self.state[name], self.paths[name] = BytesStorageMetadata(), path
            self.stored[MetadataIndex(name)] = place

    def alias(self, name: str, other: str) -> None:
        """Gives a tensor at the top level a second name."""
        entry = self.state[name]
        assert isinstance(entry, TensorStorageMetadata)
        self.state[other], self.paths[other] = entry, (other,)
        for chunk in entry.chunks:
            place = self.stored[MetadataIndex(name, chunk.offsets)]
            self.stored[MetadataIndex(other, chunk.offsets)] = place

    def close(self) -> None:
        """Ends the data files, and writes the metadata."""
        self._end_file()
        metadata = Metadata(
            state_dict_metadata=self.state,
            planner_data=self.paths,
            storage_data=self.stored,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        with (self.directory / METADATA).open("xb") as file:
            pickle.dump(metadata, file)

    def _declare(
        self,
        path: tuple[str, ...],
        shape: torch.Size,
        dtype: torch.dtype,
        placed: list[tuple[torch.Size, torch.Size, _StorageInfo]],
    ) -> None:
        name = ".".join(path)
        self.paths[name] = path
        self.state[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=shape,
            chunks=[ChunkStorageMetadata(offsets=o, sizes=s) for o, s, _ in placed],
        )
        self.stored.update({MetadataIndex(name, o): place for o, _, place in placed})

    def _append(self, value: object) -> _StorageInfo:
        if self._file is None or self._file.tell() >= _FILE_BYTES:
            self._end_file()
            self._number += 1
            self._file = (self.directory / f"__0_{self._number}.distcp").open("xb")
        start = self._file.tell()
        try:
            torch.save(value, self._file)
        except RuntimeError as error:
            # torch ends its archive even so, and that fails, too ("unexpected pos").
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        return _StorageInfo(f"__0_{self._number}.distcp", start, self._file.tell() - start)

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()


def export_dcp(reader: Reader, target: Path, *, config_path: Path | None = None) -> list[str]:
    """Writes weights and optimizer state so that `dcp.load` finds them.

    Args:
        reader: the checkpoint.
        target: directory to make; it appears when all is written.
        config_path: the model's config.json, for a checkpoint that does not hold it; it is needed
            only for the second names of tied parameters.

    Returns:
        What the user should know, a sentence each.

    Raises:
        ExchangeError: `target` cannot be written.
        CheckpointError: the checkpoint cannot be read.
    """
    manifest = reader.manifest
    names, state = parameter_names(manifest), manifest.training_state
    moments = moment_names(manifest)
    trained = [n for n in names if any(f"{m}/{n}" in manifest.tensors for m in moments)]
    config = model_config(manifest, config_path)
    with finished_directory(target) as directory:
        writer = _Writer(directory=directory)
        for name in names:
            writer.tensor((name,), reader, PARAMETERS + name)
        for name, other in () if config is None else _tied(config):
            if name in names:
                writer.alias(name, other)
        for name in trained:
            for moment in moments:
                path = ("optimizer", f"state.{name}.{moment}")
                writer.tensor(path, reader, f"{moment}/{name}")
        steps = torch.tensor(float(state.get("optimizer_steps", manifest.step)))
        writer.scalar([("optimizer", f"state.{name}.step") for name in trained], steps)
        groups = _param_groups(reader, trained)
        for (key, value), members in groups.items():
            paths = [("optimizer", f"param_groups.{name}.{key}") for name in members]
            writer.value(paths, value)
        writer.value([("train_state", "step")], manifest.step)
        writer.close()
    if groups:
        return []
    return ["It has no param_groups: the checkpoint does not tell AdamW's settings."]


def _tied(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name in a checkpoint, its other name) of each parameter that a model has twice."""
    first: dict[int, str] = {}
    for name, param in build_on_meta(config).named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            yield first[id(param)], name


def _param_groups(reader: Reader, names: list[str]) -> dict[tuple[str, Any], list[str]]:
    """AdamW's settings as `get_optimizer_state_dict` flattens them: (key, value) -> parameters.

    None where the run had another optimizer or a schedule of its own: their code is not at hand.
    """
    state = reader.manifest.training_state
    told = state.get("optimizer", {})
    if told.keys() != OptimizerConfig().info.keys() or "steps" not in state:
        return {}
    settings = OptimizerConfig(**{**told, "betas": tuple(told["betas"])})
    last = max(0, reader.manifest.step - 1)
    common = {
        "lr": settings.rate(last, state["steps"]),
        "initial_lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
    }
    groups = {(key, value): names for key, value in common.items()}
    for name in names:
        matrix = len(reader.manifest.tensors[PARAMETERS + name].shape) >= 2
        decay = settings.weight_decay if matrix else 0.0
        groups.setdefault(("weight_decay", decay), []).append(name)
    return groups
