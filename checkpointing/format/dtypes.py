"""The element types a checkpoint can hold: torch's names, safetensors' names, bytes per element.

Without torch, so that a manifest can be read and checked on a machine that has none.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """One element type."""

    tag: str
    """Its name in a safetensors header."""
    item_bytes: int
    """Bytes per element."""


DTYPES = {
    "float64": Dtype("F64", 8),
    "float32": Dtype("F32", 4),
    "float16": Dtype("F16", 2),
    "bfloat16": Dtype("BF16", 2),
    "float8_e4m3fn": Dtype("F8_E4M3", 1),
    "float8_e5m2": Dtype("F8_E5M2", 1),
    "complex64": Dtype("C64", 8),
    "int64": Dtype("I64", 8),
    "int32": Dtype("I32", 4),
    "int16": Dtype("I16", 2),
    "int8": Dtype("I8", 1),
    "uint64": Dtype("U64", 8),
    "uint32": Dtype("U32", 4),
    "uint16": Dtype("U16", 2),
    "uint8": Dtype("U8", 1),
    "bool": Dtype("BOOL", 1),
}
"""Keyed by `str(torch_dtype)` without `torch.`."""


def item_bytes(dtype: str) -> int:
    """Bytes per element of `dtype`."""
    return DTYPES[dtype].item_bytes
