"""`elastic doctor --cluster` on three hosts, of which one reaches the head and no other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from elastic.doctor.run import CHECKS
from elastic.driver.examine_cluster import examine_cluster
from tests.support.hosts import HEAD, Hosts, ip_of, requires_hosts, why_no_hosts

PATIENCE_S = 300.0


@pytest.mark.slow
def test_a_cluster_of_one_machine(cluster: None) -> None:
    found = examine_cluster(full=False)
    (machine,) = {one.node for one in found}
    assert machine.count(".") == 3
    assert [one.check for one in found] == [*CHECKS, "clock of the cluster"]
    assert found[-1].severity == "OK"


@pytest.mark.soak
@pytest.mark.timeout(2 * PATIENCE_S)
@requires_hosts
@pytest.mark.skipif(why_no_hosts(lossy=True) is not None, reason="loss needs nft")
def test_the_host_that_no_other_reaches_is_named(tmp_path: Path) -> None:
    with Hosts([1, 1, 1]) as hosts:
        others = f"ip saddr {{ {ip_of(0)}, {ip_of(2)} }}"
        hosts.lose(1, others)
        command = [sys.executable, "-m", "elastic.cli.main", "doctor", "--cluster", "--json"]
        log = tmp_path / "found"
        process = hosts.popen(HEAD, [*command, "--address", hosts.address], log)
        status = process.wait(PATIENCE_S)
    said = log.read_text()
    found = json.loads(said.splitlines()[-1])
    pairs = {one["node"]: one for one in found if one["check"] == "pairs of machines"}
    assert {node: one["severity"] for node, one in pairs.items()} == {
        ip_of(0): "OK",
        ip_of(1): "ISOLATE",
        ip_of(2): "OK",
    }, said
    assert status == 5
    assert pairs[ip_of(1)]["result"].startswith("failed with all of 2: ")
    clocks = [one for one in found if one["check"] == "clock of the cluster"]
    assert {one["node"] for one in clocks} == {ip_of(host) for host in range(3)}
    assert {one["severity"] for one in clocks} == {"OK"}
