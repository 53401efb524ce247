"""Processes to which a cgroup gives so much memory and no more, as to a container. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def _root() -> Path | None:
    """Where groups with a limit can be made."""
    if (_V1 / "memory.limit_in_bytes").exists():
        return _V1
    controllers = _V2 / "cgroup.subtree_control"
    return _V2 if controllers.exists() and "memory" in controllers.read_text().split() else None


requires_limit = pytest.mark.skipif(
    os.geteuid() != 0 or _root() is None, reason="needs root, and cgroups that bound memory"
)


@contextmanager
def little_memory(limit_bytes: int) -> Iterator[Path]:
    """A group whose processes have so much together, without swap. Yields the file that takes
    their numbers; they must have ended when the block does."""
    root = _root()
    assert root is not None
    group = root / f"elastictrainer-test-{os.getpid()}"
    group.mkdir()
    try:
        if root == _V1:
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            (group / "memory.swappiness").write_text("0")
        else:
            (group / "memory.max").write_text(str(limit_bytes))
            (group / "memory.swap.max").write_text("0")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()
