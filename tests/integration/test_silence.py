"""Replicas over several hosts, without Ray: where Gloo listens; a peer whose host vanishes, and the
store's."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.hosts import Network, ip_of, requires_hosts

PROGRAM = ROOT / "tests/support/replica_over_hosts.py"
STORE_PROGRAM = ROOT / "tests/support/store_over_hosts.py"
DEADLINE_S = 100.0


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)


@requires_hosts
@pytest.mark.parametrize("cut", [True, False])
def test_a_peer_is_given_up_when_its_host_is_silent_and_only_then(
    tmp_path: Path, cut: bool
) -> None:
    """Rank 0 waits in a collective for rank 1, which sleeps; meanwhile rank 1's link is cut. Far
    within the timeout of the collective (900 s), that ends the wait."""
    silent_s, sleep_s = 2.0, 4.0
    with Network(2) as network:
        logs = [tmp_path / "0", tmp_path / "1"]
        numbers = [str(silent_s), str(60 if cut else sleep_s)]
        for rank in range(2):
            program = [sys.executable, str(PROGRAM), str(rank), ip_of(0), *numbers]
            network.popen(rank, program, logs[rank])
        wait_for(logs[0], "waiting")
        started = time.monotonic()
        if cut:
            network.cut(1)
            wait_for(logs[0], "given up")
            assert time.monotonic() - started >= silent_s - 0.5
        else:
            wait_for(logs[0], "done")
            assert time.monotonic() - started >= sleep_s - 0.5


@requires_hosts
def test_a_store_is_given_up_when_its_host_is_silent(tmp_path: Path) -> None:
    """A call to it, which has no other bound but that of the rendezvous (900 s)."""
    silent_s = 3.0
    with Network(2) as network:
        logs = [tmp_path / "0", tmp_path / "1"]
        for rank in range(2):
            program = [sys.executable, str(STORE_PROGRAM), str(rank), ip_of(0), str(silent_s)]
            network.popen(rank, program, logs[rank])
            wait_for(logs[0], ("listens", "waited in")[rank])
        started = time.monotonic()
        network.cut(0)
        wait_for(logs[1], "given up")
        assert time.monotonic() - started < 4 * silent_s
