"""Ray's own way: its node is ended, and its autoscaler brings another for those who wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.providers.node_provider import NodeIdentity


class RayProvider:
    """A `NodeProvider` for whatever machines Ray has. Ray ends no node that it drains; this does.

    Args:
        end_node: has Ray end a node, given by its id.
    """

    def __init__(self, end_node: Callable[[str], None]) -> None:
        self._end_node = end_node

    def machine_of(self, node: NodeIdentity) -> str:
        return node.name

    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        for node in nodes:
            self._end_node(node.node)
        return "its Ray node was ended; another comes where Ray has an autoscaler"

    def reboot(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str | None:
        return None

    def complaints(self) -> dict[str, str]:
        return {}
