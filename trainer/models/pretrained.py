"""Weights of a local Hugging Face model directory, read slice by slice from its safetensors
files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import ConfigError
from trainer.models.stored import Place, Stored, Whole, plan_places

if TYPE_CHECKING:
    from torch import nn

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
"""Formats of stored weights, by safetensors' names; in others they are codes, with scales beside
them."""


class PretrainedWeights:
    """Boxes of the parameters in a directory with safetensors weights. Implements WeightSource.

    Args:
        directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.
        model: whose names are read, where the files may have others; None: the files' own.

    Raises:
        ConfigError: the directory holds no safetensors weights (pickled ones are never read), or
            none that can be read.
    """

    def __init__(self, directory: str, model: nn.Module | None = None) -> None:
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
        self._places: Mapping[str, Place] = {name: Whole(name) for name in self._files}
        self._unread: Mapping[str, list[str]] = {}
        if model is not None:
            self._places, self._unread = plan_places(model, self._files)

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
        held = [name for name in buffers if name in self._places]
        with self._opened() as stored:
            for name in held:
                shape = tuple(buffers[name].shape)
                self._check_shape(name, shape, stored)
                value = self._places[name].read(stored, (0,) * len(shape), shape)
                buffers[name].copy_(value)
        return held

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks from the files' headers that they hold every parameter of the model.

        Args:
            shapes: the model's parameters, name -> shape.

        Raises:
            ConfigError: names the first parameter that is missing, of another shape, or no number.
        """
        for name in shapes:
            if name in self._unread:
                raise self._error(
                    f"it holds {name} in a form that is not read here "
                    f"({', '.join(self._unread[name])})",
                    "Load it with transformers, and save it with save_pretrained(DIR, "
                    "save_original_format=False)",
                )
        missing = sorted(set(shapes) - set(self._places))
        if missing:
            raise self._error(f"{len(missing)} parameters are not in it, first {missing[0]!r}")
        with self._opened() as stored:
            for name, shape in shapes.items():
                self._check_shape(name, shape, stored)
                self._check_format(name, stored)

    def _check_shape(self, name: str, shape: tuple[int, ...], stored: Stored) -> None:
        try:
            found = self._places[name].shape(stored)
        except ValueError as error:
            raise self._error(f"{name} cannot be put together: {error}") from error
        if found != shape:
            raise self._error(f"{name} is {found} in the files and {shape} in the model")

    def _check_format(self, name: str, stored: Stored) -> None:
        for part in self._places[name].names():
            dtype = stored(part).get_dtype()
            if dtype not in NUMBERS:
                raise self._error(
                    f"{part} is {dtype} in the files, which is no format of a trainable weight",
                    "Give the model in bfloat16 or float32: a quantized one, dequantized and saved",
                )

    @contextmanager
    def _opened(self) -> Iterator[Stored]:
        """The stored tensors by their names, each file opened once."""
        with ExitStack() as stack:
            files: dict[str, Any] = {}

            def stored(name: str) -> Any:
                file = self._files[name]
                try:
                    if file not in files:
                        opened = safe_open(self._directory / file, framework="pt")
                        files[file] = stack.enter_context(opened)
                    return files[file].get_slice(name)
                except (OSError, SafetensorError) as error:
                    raise self._error(f"{file} cannot be read: {error}") from error

            yield stored

    def _error(
        self, fact: str, fix: str = "Give a directory saved whole from the same architecture"
    ) -> ConfigError:
        return ConfigError("train.task.model.path", str(self._directory), fact, fix)

    def read(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """See WeightSource."""
        if 0 in sizes:
            return torch.empty(sizes)
        with self._opened() as stored:
            return self._places[name].read(stored, offsets, sizes).float()
