"""Versions of what a run stands on: this package's own, and what changes from start to start."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def own_version() -> str:
    """Of this package, where what runs is what is installed. A job's `working_dir` goes before
    that, which may be another on each node; of a checkout, as `pip install -e` takes it, the number
    says little."""
    try:
        own = distribution("elastictrainer")
    except PackageNotFoundError:
        return "from source"
    installed = Path(str(own.locate_file("elastic/protocol/versions.py")))
    return own.version if installed.resolve() == Path(__file__).resolve() else "from source"


def describe_change(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Of what both name, as earlier records name less; empty where nothing changed."""
    return ", ".join(
        f"{name} {before[name]}, now {version}"
        for name, version in now.items()
        if before.get(name, version) != version
    )
