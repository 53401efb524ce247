"""Stands for NVIDIA's package of NVML, which answers as its documentation says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NotSupportedError(Exception):
    """What NVML raises for what a GPU does not have; the others are made from it, as there."""


class LostError(NotSupportedError):
    """The GPU has fallen off the bus."""


class NoPermissionError(NotSupportedError):
    """The GPU is another job's or container's."""


class ResetRequiredError(NotSupportedError):
    """The GPU must be reset before it answers this."""


def refuse(*_: Any) -> Any:
    """An answer: there is none."""
    raise NotSupportedError


def require_reset(*_: Any) -> Any:
    """An answer of a GPU that must be reset."""
    raise ResetRequiredError


class Nvml(SimpleNamespace):
    """Answers what it was given; whatever it was not, it does not support. Constants that it has
    no number of are their names."""

    NVMLError, NVMLError_GpuIsLost = NotSupportedError, LostError
    NVMLError_NoPermission, NVMLError_ResetRequired = NoPermissionError, ResetRequiredError
    NVML_SUCCESS = 0
    NVML_VALUE_TYPE_UNSIGNED_INT = 1
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1

    def __getattr__(self, name: str) -> Any:
        return refuse if name.startswith("nvmlDevice") else name
