"""A Ray cluster whose real autoscaler starts and ends nodes, each a raylet here, by Ray's
fake provider of them.

`ray.cluster_utils.AutoscalingCluster` begins and ends with `ray stop --force`, which ends the
clusters of others on this machine, and reads a file that Ray's package lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import _raylet

from benchmarks._processes import free_port
from tests.support import ROOT

WAIT_S = 120.0
_HEAD_ID = "f" * 51 + "00000"
"""What the fake provider calls the head."""
_MACHINE = "machine"
_ALIVE = 0
"""State of a node, as Ray's control plane numbers it."""


@dataclass(frozen=True, kw_only=True)
class AutoscaledCluster:
    """Its head has no room for workers."""

    address: str
    """For `ray.init`."""

    def living_nodes(self) -> list[str]:
        """Ray's ids of those that the autoscaler has started."""
        internals: Any = _raylet
        nodes = internals.GcsClient(address=self.address).get_all_node_info().values()
        return [n.node_id.hex() for n in nodes if n.state == _ALIVE and not n.is_head_node]


@contextmanager
def autoscaled_cluster(least: int, most: int) -> Iterator[AutoscaledCluster]:
    """A cluster that gets nodes with a CPU each: `least` always, up to `most` where they are asked
    for."""
    place = Path(tempfile.mkdtemp(prefix="scaled-", dir="/tmp"))  # Ray's sockets need a short name
    port = free_port()
    address = f"127.0.0.1:{port}"
    (place / "scaling.json").write_text(json.dumps(_config(least, most, address)))
    log = (place / "log").open("w")
    head = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *(f"--port={port}", "--num-cpus=0"),
            *("--include-dashboard=false", f"--temp-dir={place / 'ray'}"),
            f"--autoscaling-config={place / 'scaling.json'}",
        ],
        env=_environment(),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    cluster = AutoscaledCluster(address=address)
    try:
        _wait_until_up(head, cluster, least, place / "log")
        yield cluster
    finally:
        _end_all(place)
        head.wait(WAIT_S)
        log.close()
        shutil.rmtree(place, ignore_errors=True)


def _config(least: int, most: int, address: str) -> dict[str, Any]:
    return {
        "cluster_name": "scaled",
        "max_workers": most,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 10,
        "provider": {
            "type": "external",  # by its own name it is missing a file of Ray's package
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "disable_node_updaters": True,
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": _HEAD_ID,
        },
        "auth": {},
        "docker": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
            _MACHINE: {
                "resources": {"CPU": 1},
                "node_config": {},
                "min_workers": least,
                "max_workers": most,
            },
        },
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return ours | {
        "PYTHONPATH": str(ROOT),
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
        "RAY_enable_autoscaler_v2": "1",
    }


def _wait_until_up(
    head: subprocess.Popen[bytes], cluster: AutoscaledCluster, least: int, log: Path
) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        assert head.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        with contextlib.suppress(Exception):  # it does not listen yet
            if len(cluster.living_nodes()) >= least:
                return
        time.sleep(0.1)


def _end_all(place: Path) -> None:
    """Ends the processes that were told of `place`: the cluster's. What one has started
    meanwhile is found by the next look."""
    while found := [pid for pid in _processes() if str(place).encode() in _command(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
