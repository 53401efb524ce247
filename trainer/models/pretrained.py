"""Weights of a local Hugging Face model directory, read slice by slice from its safetensors
files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from trainer.errors import ConfigError


class PretrainedWeights:
    """Boxes of the parameters in a directory with safetensors weights. Implements WeightSource.

    Args:
        directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.

    Raises:
        ConfigError: the directory holds no safetensors weights (pickled ones are never read).
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        index = self._directory / "model.safetensors.index.json"
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (self._directory / "model.safetensors").is_file():
            with safe_open(self._directory / "model.safetensors", framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise ConfigError(
                "train.task.model.path",
                directory,
                "no model.safetensors or model.safetensors.index.json in it",
                "Save the model with save_pretrained(..., safe_serialization=True)",
            )

    def check_names(self, names: Iterable[str]) -> None:
        """Raises ConfigError where a parameter of the model is not in the files."""
        missing = sorted(set(names) - set(self._files))
        if missing:
            raise ConfigError(
                "train.task.model.path",
                str(self._directory),
                f"{len(missing)} parameters are not in its files, first {missing[0]!r}",
                "Give a directory saved from the same architecture",
            )

    def read(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """See WeightSource."""
        with safe_open(self._directory / self._files[name], framework="pt") as file:
            stored = file.get_slice(name)
            if tuple(stored.get_shape()) != shape:
                raise ConfigError(
                    "train.task.model.path",
                    str(self._directory),
                    f"{name} is {tuple(stored.get_shape())} in the files and {shape} in the model",
                    "Give a directory whose config.json matches its weights",
                )
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            return stored[box].float() if box else file.get_tensor(name).float()
