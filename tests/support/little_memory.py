"""Processes to which a cgroup gives so much memory and no more, as to a container. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.watching import wait_until

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


@dataclass(frozen=True)
class Group:
    """Processes with a limit, and without swap."""

    root: Path

    @property
    def join(self) -> list[str]:
        """What stands before a command that is to run within."""
        return ["sh", "-c", f'echo $$ > {self.root / "cgroup.procs"}; exec "$@"', "sh"]

    @property
    def pids(self) -> list[int]:
        """Those that are in it now."""
        return [int(pid) for pid in (self.root / "cgroup.procs").read_text().split()]

    @property
    def counter(self) -> Path:
        """The file with the kernel's count of those that it has ended."""
        return self.root / ("memory.oom_control" if self._is_v1 else "memory.events")

    @property
    def used_bytes(self) -> int:
        """What they have together."""
        name = "memory.usage_in_bytes" if self._is_v1 else "memory.current"
        return int((self.root / name).read_text())

    @property
    def _is_v1(self) -> bool:
        return self.root.parent == _V1

    def limit(self, to_bytes: int) -> None:
        """They have so much together from now on."""
        name = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self.root / name).write_text(str(to_bytes))

    def prefer(self, victim: int) -> None:
        """Of those that are in it the kernel ends this one first. Ray prefers all its workers."""
        for pid in self.pids:
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000" if pid == victim else "0")


@contextmanager
def little_memory(limit_bytes: int) -> Iterator[Group]:
    """A group whose processes have so much together; they must come to their end when the block
    does."""
    root = _root()
    assert root is not None
    group = Group(root / f"elastictrainer-test-{os.getpid()}")
    group.root.mkdir()
    try:
        group.limit(limit_bytes)
        swap = group.root / ("memory.swappiness" if root == _V1 else "memory.swap.max")
        swap.write_text("0")
        yield group
    finally:
        wait_until(lambda: not group.pids, 60.0)
        group.root.rmdir()
