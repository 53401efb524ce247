"""Nodes of Ray that share this machine: each is a raylet of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from elastic.errors import ReplaceError
from elastic.node_config import LocalNodes
from elastic.providers.node_provider import NodeIdentity
from health.oom_kills import RAY_MONITOR

_START_TIMEOUT_S = 120.0


class LocalProvider:
    """A `NodeProvider` that starts raylets on the machine that it runs on. They end with the
    cluster. It keeps no account of them: each call of `replace` starts one.

    Args:
        config: what they have.
        end_node: has Ray end a node, given by its id.
        address: the Ray cluster's.
    """

    def __init__(
        self, config: LocalNodes, end_node: Callable[[str], None], address: Callable[[], str]
    ) -> None:
        self._cpus, self._end_node, self._address = config.cpus, end_node, address

    def machine_of(self, node: NodeIdentity) -> str:
        """All share an address: the node is what is at fault."""
        return node.node

    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        for node in nodes:
            self._end_node(node.node)
        start = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start"),
            *("--address", self._address(), "--num-cpus", str(self._cpus)),
        ]
        # Those that tell of this process of Ray's are not for a node; those that let it in are, and
        # how its memory monitor is set.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") or name.startswith("RAY_AUTH_") or name == RAY_MONITOR
        }
        try:
            subprocess.run(
                start,
                env=kept,
                timeout=_START_TIMEOUT_S,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except subprocess.CalledProcessError as error:
            said = " ".join(error.stdout.split())[-500:]
            raise ReplaceError(
                machine,
                f"`ray start` ended with {error.returncode}: {said}",
                "Start a node by hand",
            ) from error
        return f"another Ray node with {self._cpus} CPUs was started on this machine"

    def reboot(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str | None:
        return None

    def complaints(self) -> dict[str, str]:
        return {}
