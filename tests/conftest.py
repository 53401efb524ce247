"""What the tests share: the same random numbers each time, one Ray cluster, the text that runs
learn; and no GPU tests without a GPU."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# c10d looks up the name of each peer's address. Where the name service loses a question now and
# then, that is 5 s each time, in a tenth of all connections.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Two files go beside each other. Where the processes of both compute on all cores, threads spin for
# those that have none: a file with 16 s of CPU time took a minute, and 24 s with one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A million objects are there once all tests are collected, and stay. To look through them again and
# again takes a third of collecting, and as much of a test that makes many objects.
gc.disable()

# How long an example takes is the machine's affair.
settings.register_profile("here", deadline=None)
settings.load_profile("here")


def pytest_collection_finish() -> None:
    """What is there now is not looked at any more; garbage of the tests is collected as ever. With
    pytest-xdist the first process collects nothing, and runs none."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Seed the generators that are loaded; importing torch for a test without it costs seconds."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_left_in_native_code() -> Iterator[None]:
    """One that comes back from there while the interpreter ends aborts the whole session."""
    yield
    if "trainer.backend.rendezvous" not in sys.modules:
        return
    sys.modules["trainer.backend.rendezvous"].close_connections()
    for thread in threading.enumerate():
        if thread.name in ("store-connection", "make-groups", "heal-copy", "heal-target"):
            thread.join(timeout=2)
            assert not thread.is_alive(), f"{thread.name} is still in a process group"


@pytest.fixture(autouse=True)
def _gloo_listens_anywhere_again() -> Iterator[None]:
    """A group made in this process has set where Gloo listens, also for programs that later tests
    start on other hosts."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    yield
    if before is None:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One real Ray cluster for all runs; tests without a run do not wait for Ray's import."""
    from tests.support.local_cluster import local_cluster

    with local_cluster():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny import write_text

    return write_text(tmp_path_factory.mktemp("text"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the chosen tier leaves out, and how to run it."""
    for tier in ("slow", "soak"):
        items = terminalreporter.stats.get("deselected", [])
        count = sum(item.get_closest_marker(tier) is not None for item in items)
        if count:
            terminalreporter.write_line(
                f"left out: {count} {tier} tests; make test-{tier} runs them"
            )
