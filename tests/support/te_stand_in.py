"""Transformer Engine's converter for tests without a GPU: by what stands in for the library."""

from __future__ import annotations

from tests.support import ROOT
from trainer.te.config import TransformerEngine

STAND_INS = str(ROOT / "tests/support/stand_ins")
"""The folder that a test puts on `sys.path`."""


class OnCpu(TransformerEngine):
    """Takes the CPU for a device that the library has kernels for."""

    devices = ("cpu",)
