"""Attention of one block, by the device's own kernel: its result, and for each query the logarithm
of the sum of its exponentials, by which blocks are put together.

Fewer heads of keys than of queries are each shared by as many queries in a row, in the kernels.

Shapes: q_BHQD, k_BGKD (batch, heads, queries or keys, head dim); lse_BHQ is float32.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

_aten = torch.ops.aten


class Piece(NamedTuple):
    """The arguments of a block."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool
    """No query meets a key after it; there are as many of both."""
    scale: float
    """Of the products."""


class Kernel(Protocol):
    """A device's attention."""

    def forward(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """(result, lse)."""
        ...

    def backward(
        self, grad: torch.Tensor, piece: Piece, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value, from those of the result.

        Args:
            grad: of the result.
            piece: as in forward.
            out: result of these queries with all their keys, in this block and others.
            lse: likewise.
        """
        ...


class CpuKernel:
    """torch's flash attention for CPUs, in any number format."""

    def forward(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernel."""
        query, key, value, causal, scale = piece
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )

    def backward(
        self, grad: torch.Tensor, piece: Piece, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Kernel."""
        query, key, value, causal, scale = piece
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )


class CudaKernel:
    """FlashAttention 2 as torch has it: in bfloat16, head sizes that 8 divides, up to 256. With
    deterministic algorithms its backward adds up in a fixed order."""

    def forward(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernel."""
        query, key, value, causal, scale = piece
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, lse

    def backward(
        self, grad: torch.Tensor, piece: Piece, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Kernel."""
        query, key, value, causal, scale = piece
        unused = query.new_empty(0, dtype=torch.uint64)  # states of random numbers: no dropout
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, None, None, query.shape[2], key.shape[2], 0.0,
            causal, unused, unused, scale=scale,
        )  # fmt: skip


_KERNELS: dict[str, Kernel] = {"cpu": CpuKernel(), "cuda": CudaKernel()}


def kernel_of(tensor: torch.Tensor) -> Kernel:
    """That of a tensor's device."""
    return _KERNELS[tensor.device.type]
