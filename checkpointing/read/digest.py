"""One number for a model's weights, to compare runs bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from checkpointing.format.tensor_bytes import raw_bytes
from checkpointing.read.reader import Reader


def tensors_sha256(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over full CPU tensors, in the order given.

    Of each: name, dtype and shape as UTF-8 text, each with a zero byte behind it (`w`, `float32`,
    `2,3`), then the elements' bytes in row-major order.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def params_sha256(reader: Reader, names: Iterable[str]) -> str:
    """`tensors_sha256` of a checkpoint's tensors, in name order; one in memory at a time."""
    return tensors_sha256((name, reader.read_full(name)) for name in sorted(names))
