"""Stands in for Transformer Engine, which has no CPU code. Shows that our calls fit its signatures
and that our weights reach it; of its kernels it shows nothing."""

__version__ = "2.18.0"
