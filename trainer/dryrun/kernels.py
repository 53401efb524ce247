"""What kernels take beside their results, by the device. Pure.

Attention in forward keeps the same on both: its output, and one float32 for each head and token. A
fused AdamW takes nothing on either. A composed operation (a norm, a rotation) is run as what it is
composed of. What is compiled is counted by `fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Beside = Mapping[Any, Callable[..., int]]
"""Operation -> bytes that it takes while it runs, from its arguments."""


def attention_backward_bytes(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any
) -> int:
    """The query's gradient is added up in float32; with fewer heads of keys than of queries, the
    gradients of keys and values are there for every head of queries first.
    Source: flash_api.cpp of FlashAttention 2, as in torch."""
    heads, key_heads = query.shape[1], key.shape[1]
    expanded = 2 * query.nbytes if heads != key_heads else 0
    return query.numel() * torch.float32.itemsize + expanded


def product_of_8_bits_bytes(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """On a CPU factors and product are float32: `trainer/float8/products.py`."""
    return (a.numel() + b.numel() + a.shape[0] * b.shape[1]) * torch.float32.itemsize


BESIDE: dict[str, Beside] = {
    "cpu": {torch.ops.aten._scaled_mm.default: product_of_8_bits_bytes},
    "cuda": {_ATTENTION: attention_backward_bytes},
}
"""By the device."""
