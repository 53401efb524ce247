"""A path between two hosts that loses large packets: the workers' test of their connections names
it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.integration.test_silence import wait_for
from tests.support import ROOT
from tests.support.black_hole import dig_black_hole
from tests.support.hosts import Network, ip_of, requires_hosts
from trainer.backend.link_test import LINK_BYTES

PROGRAM = ROOT / "tests/support/links_over_hosts.py"
BOUND_S = 3.0


@requires_hosts
def test_the_two_ends_of_a_black_hole_name_each_other(tmp_path: Path) -> None:
    """They can connect, and small packets pass."""
    size = 3
    with Network(size) as network:
        dig_black_hole(network, 1, 2)
        logs = [tmp_path / str(rank) for rank in range(size)]
        for rank in range(size):
            numbers = [str(rank), str(size), ip_of(0), str(BOUND_S)]
            network.popen(rank, [sys.executable, str(PROGRAM), *numbers], logs[rank])
        found = []
        for log in logs:
            wait_for(log, "found {")
            found.append(ast.literal_eval(log.read_text().partition("found ")[2]))
    assert [list(short) for short in found] == [[], [2], [1]]
    for short in found[1:]:
        (came,) = short.values()
        assert 0 < came < LINK_BYTES
