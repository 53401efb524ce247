"""The state that every system saves: the tensors of a small Llama and both moments, in float32."""

from __future__ import annotations

import math

import torch
from torch import nn

from checkpointing import Box, TensorSlice
from elastic import CustomTask
from trainer.parallel.layout import ParallelDims, Slot, local_box

BYTES_PER_PARAMETER = 12
_LAYERS = 8
_GRAIN = 64


class Block(nn.Module):
    """One layer's parameters, with Llama's proportions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width * 11 // 4
        for name, rows, columns in (
            ("q", width, width),
            ("k", width // 4, width),
            ("v", width // 4, width),
            ("o", width, width),
            ("gate", inner, width),
            ("up", inner, width),
            ("down", width, inner),
        ):
            setattr(self, name, nn.Parameter(torch.zeros(rows, columns)))
        self.norm1 = nn.Parameter(torch.zeros(width))
        self.norm2 = nn.Parameter(torch.zeros(width))


def plan_shape(size_bytes: int) -> tuple[int, int]:
    """Width and layers of the model whose state has about `size_bytes`. Pure."""
    parameters = size_bytes / BYTES_PER_PARAMETER
    grown = math.sqrt(parameters / (32 + _LAYERS * 10.75))  # embedding and head, and the layers
    width = max(1, round(grown / _GRAIN)) * _GRAIN
    layers = max(1, round((parameters - 32 * width**2) / (10.75 * width**2)))
    return width, layers


def _no_loss(model: nn.Module, batch: object) -> tuple[torch.Tensor, int]:
    raise AssertionError("no step is taken")


def make_task(size_bytes: int) -> CustomTask:
    """The model as a task; nothing is learned."""
    width, layers = plan_shape(size_bytes)

    def build() -> nn.Module:
        table = nn.Embedding(16 * width, width, _weight=torch.zeros(16 * width, width))
        head = nn.Embedding(16 * width, width, _weight=torch.zeros(16 * width, width))
        return nn.Sequential(table, *(Block(width) for _ in range(layers)), head)

    return CustomTask(build_model=build, loss_function=_no_loss, dataset=[0])


def plan_rows(
    tensors: dict[str, tuple[tuple[int, ...], str]], shards: int, index: int
) -> list[TensorSlice]:
    """What one of so many workers holds, its rows of each tensor, as FSDP cuts. Pure."""
    slices, slot = [], Slot(replica=0, rank=index, dims=ParallelDims(shard=shards))
    for name, (shape, dtype) in tensors.items():
        offsets, sizes = local_box(shape, slot, tensor_dim=None)
        slices.append(TensorSlice(name, shape, dtype, offsets, sizes))
    return slices


def boxes_of(slices: list[TensorSlice]) -> list[Box]:
    """Those that have elements."""
    return [part.box for part in slices if math.prod(part.sizes)]
