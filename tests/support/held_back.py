"""Processes that a cgroup gives a share of a core: a machine whose clock is slowed. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_PERIOD_US = 20_000


def _root() -> Path | None:
    """Where groups with a quota can be made."""
    if (_V1 / "cpu.cfs_quota_us").exists():
        return _V1
    controllers = _V2 / "cgroup.subtree_control"
    return _V2 if controllers.exists() and "cpu" in controllers.read_text().split() else None


requires_quota = pytest.mark.skipif(
    os.geteuid() != 0 or _root() is None, reason="needs root, and cgroups that bound CPU time"
)


@contextmanager
def held_back(pids: Iterable[int], cores: float) -> Iterator[None]:
    """The processes have `cores` cores together, in the block."""
    root = _root()
    assert root is not None
    group = root / f"elastictrainer-test-{os.getpid()}"
    group.mkdir()
    quota_us = int(cores * _PERIOD_US)
    if root == _V1:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(member)
        group.rmdir()


def throttled_periods() -> int:
    """Times that the processes of the block were held back so far."""
    root = _root()
    assert root is not None
    group = root / f"elastictrainer-test-{os.getpid()}"
    stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(stat["nr_throttled"])
