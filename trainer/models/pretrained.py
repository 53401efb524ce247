"""Weights of a local Hugging Face model directory, read slice by slice from its safetensors
files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

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
            try:
                with safe_open(self._directory / "model.safetensors", framework="pt") as file:
                    self._files = dict.fromkeys(file.keys(), "model.safetensors")
            except SafetensorError as error:
                raise self._error(f"model.safetensors cannot be read: {error}") from error
        else:
            raise ConfigError(
                "train.task.model.path",
                directory,
                "no model.safetensors or model.safetensors.index.json in it",
                "Save the model with save_pretrained(..., safe_serialization=True)",
            )

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks from the files' headers that they hold every parameter of the model.

        Args:
            shapes: the model's parameters, name -> shape.

        Raises:
            ConfigError: names the first parameter that is missing or of another shape.
        """
        missing = sorted(set(shapes) - set(self._files))
        if missing:
            raise self._error(f"{len(missing)} parameters are not in it, first {missing[0]!r}")
        for name, shape in shapes.items():
            try:
                with safe_open(self._directory / self._files[name], framework="pt") as file:
                    stored = tuple(file.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise self._error(f"{self._files[name]} cannot be read: {error}") from error
            if stored != shape:
                raise self._error(f"{name} is {stored} in the files and {shape} in the model")

    def _error(self, fact: str) -> ConfigError:
        return ConfigError(
            "train.task.model.path",
            str(self._directory),
            fact,
            "Give a directory saved whole from the same architecture",
        )

    def read(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """See WeightSource."""
        with safe_open(self._directory / self._files[name], framework="pt") as file:
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            return file.get_slice(name)[box].float() if box else file.get_tensor(name).float()
