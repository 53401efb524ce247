"""A configuration as it must not be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Undocumented:
    """Its field is said nothing about."""

    steps: int = 1
