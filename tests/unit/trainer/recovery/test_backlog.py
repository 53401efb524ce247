"""How much a newcomer keeps while its state is on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.backend.host_memory import HostMemory, host_memory
from trainer.recovery.backlog import Backlog
from trainer.replication.step_commit import Commit

MIB = 2**20
KEPT = torch.ones(MIB // 4)  # 1 MiB


def commit_of(step: int) -> Commit:
    return Commit(step=step, loss=1.0, grad_norm=2.0, tokens=4, digests=b"", boundary=False)


def never() -> HostMemory:
    raise AssertionError("a small backlog is not worth a look at the host's memory")


def test_the_first_bytes_are_free() -> None:
    backlog = Backlog(free_bytes=3 * MIB, measure=never)
    for step in range(3):
        assert backlog.no_room(MIB) is None
        backlog.keep(commit_of(step), KEPT)
    assert (len(backlog), backlog.bytes) == (3, 3 * MIB)
    with pytest.raises(AssertionError, match="not worth"):
        backlog.no_room(1)


@pytest.mark.parametrize(("available", "room"), [(26 * MIB, True), (26 * MIB - 1, False)])
def test_a_quarter_of_the_host_stays_free(available: int, room: bool) -> None:
    memory = HostMemory(available_bytes=available, total_bytes=100 * MIB)
    backlog = Backlog(free_bytes=0, measure=lambda: memory)
    assert (backlog.no_room(MIB) is None) is room


def test_what_was_taken_makes_room_again() -> None:
    full = HostMemory(available_bytes=0, total_bytes=100 * MIB)
    backlog = Backlog(free_bytes=2 * MIB, measure=lambda: full)
    for step in range(2):
        backlog.keep(commit_of(step), KEPT * step)
    reason = backlog.no_room(MIB)
    assert reason is not None and "2 steps" in reason and "25.0 MiB stay free" in reason
    commit, gradient = backlog.take_oldest()
    assert commit.step == 0 and not gradient.any()
    assert backlog.no_room(MIB) is None
    backlog.clear()
    assert (len(backlog), backlog.bytes) == (0, 0)


def test_what_is_kept_is_a_copy() -> None:
    backlog, gradient = Backlog(), torch.ones(4)
    backlog.keep(commit_of(0), gradient)
    gradient.zero_()
    assert backlog.take_oldest()[1].tolist() == [1.0] * 4


def test_a_machine_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nHugePages: 0\n"
    )
    found = host_memory(tmp_path / "meminfo", tmp_path)
    assert found == HostMemory(available_bytes=400 * 1024, total_bytes=1000 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path / "meminfo", tmp_path) == found


@pytest.mark.parametrize(
    ("used", "cache", "available"), [(200_000, 50_000, 150_000), (900_000, 0, 0)]
)
def test_a_container_with_a_limit(tmp_path: Path, used: int, cache: int, available: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 400 kB\n")
    (tmp_path / "memory.max").write_text("300000\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\n")
    found = host_memory(tmp_path / "meminfo", tmp_path)
    assert found == HostMemory(available_bytes=available, total_bytes=300_000)


def test_this_machine() -> None:
    found = host_memory()
    assert 0 < found.available_bytes < found.total_bytes
