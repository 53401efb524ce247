"""Ray's own metrics endpoint, and a Prometheus that scrapes it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support import ROOT
from tests.support.watching import wait_until

MONITORING = ROOT / "examples" / "monitoring"
PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")

requires_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="needs prometheus and promtool (Debian's package prometheus)",
)


def metrics_address() -> str:
    """Where this process's node shows its metrics, as host:port."""
    here = ray.get_runtime_context().get_node_id()
    (node,) = (row for row in ray.nodes() if row["NodeID"] == here)
    return f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"


def get(url: str) -> str:
    """The body of a page on this machine."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


class Prometheus:
    """Asks a Prometheus on this machine."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of a successful answer of its API."""
        query = urllib.parse.urlencode(parameters)
        answer = json.loads(get(f"http://{self.address}/api/v1/{path}?{query}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        return list(self.ask("query", query=expression)["result"])


@contextmanager
def scraping(target: str, directory: Path) -> Iterator[Prometheus]:
    """A Prometheus with the configuration of `examples/monitoring`, each second instead of each
    ten, that scrapes `target` (host:port). Its files go to `directory`."""
    assert PROMETHEUS is not None
    found = directory / "nodes.json"
    found.write_text(json.dumps([{"targets": [target]}]))
    config = (MONITORING / "prometheus.yml").read_text()
    for old, new in (
        ("/tmp/ray/prom_metrics_service_discovery.json", str(found)),
        ("10s", "1s"),
        ("rule_files: [alerts.yml]", f"rule_files: [{MONITORING / 'alerts.yml'}]"),
    ):
        assert old in config
        config = config.replace(old, new)
    (directory / "prometheus.yml").write_text(config)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: _ready(address) or process.poll() is not None, pause_s=0.1)
        assert process.poll() is None, (directory / "prometheus.log").read_text()
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(30)


def _ready(address: str) -> bool:
    try:
        get(f"http://{address}/-/ready")
    except OSError:
        return False
    return True
