"""Weights of a local Hugging Face model directory, read slice by slice from its safetensors
files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
"""Formats of stored weights, by safetensors' names; in others they are codes, with scales beside
them."""


class PretrainedWeights:
    """Boxes of the parameters in a directory with safetensors weights. Implements WeightSource.

    Args:
        directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.

    Raises:
        ConfigError: the directory holds no safetensors weights (pickled ones are never read), or
            none that can be read.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        found = [name for name in (INDEX, SINGLE) if (self._directory / name).is_file()]
        if not found:
            raise ConfigError(
                "train.task.model.path",
                directory,
                f"no {SINGLE} or {INDEX} in it",
                "Save the model with save_pretrained(...), which writes safetensors",
            )
        try:
            self._files = self._read_index() if found[0] == INDEX else self._read_names()
        except (ValueError, LookupError, TypeError, SafetensorError) as error:
            raise self._error(f"{found[0]} cannot be read: {error}") from error

    def _read_index(self) -> dict[str, str]:
        return dict(json.loads((self._directory / INDEX).read_text())["weight_map"])

    def _read_names(self) -> dict[str, str]:
        with safe_open(self._directory / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def fill(self, buffers: Mapping[str, torch.Tensor]) -> list[str]:
        """Gives buffers the values that the files hold; others keep their own.

        Args:
            buffers: the model's, by name.

        Returns:
            Names of those that are in the files.

        Raises:
            ConfigError: one has another shape there.
        """
        held = [name for name in buffers if name in self._files]
        for name in held:
            self._check(name, tuple(buffers[name].shape))
            with safe_open(self._directory / self._files[name], framework="pt") as file:
                buffers[name].copy_(file.get_tensor(name))
        return held

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks from the files' headers that they hold every parameter of the model.

        Args:
            shapes: the model's parameters, name -> shape.

        Raises:
            ConfigError: names the first parameter that is missing, of another shape, or no number.
        """
        missing = sorted(set(shapes) - set(self._files))
        if missing:
            raise self._error(f"{len(missing)} parameters are not in it, first {missing[0]!r}")
        for name, shape in shapes.items():
            dtype = self._check(name, shape)
            if dtype not in NUMBERS:
                raise self._error(
                    f"{name} is {dtype} in the files, which is no format of a trainable weight",
                    "Give the model in bfloat16 or float32: a quantized one, dequantized and saved",
                )

    def _check(self, name: str, shape: tuple[int, ...]) -> str:
        """Checks the shape of a stored tensor, and returns its number format."""
        try:
            with safe_open(self._directory / self._files[name], framework="pt") as file:
                stored = file.get_slice(name)
                found, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
        except (OSError, SafetensorError) as error:
            raise self._error(f"{self._files[name]} cannot be read: {error}") from error
        if found != shape:
            raise self._error(f"{name} is {found} in the files and {shape} in the model")
        return dtype

    def _error(
        self, fact: str, fix: str = "Give a directory saved whole from the same architecture"
    ) -> ConfigError:
        return ConfigError("train.task.model.path", str(self._directory), fact, fix)

    def read(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """See WeightSource."""
        with safe_open(self._directory / self._files[name], framework="pt") as file:
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            return file.get_slice(name)[box].float() if box else file.get_tensor(name).float()
