"""From the setting to the provider of machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from elastic.node_config import Ec2Nodes, KubeNodes, LocalNodes, NodesConfig
from elastic.providers.node_provider import NodeProvider


def open_provider(
    config: Literal["tell"] | NodesConfig,
    *,
    end_node: Callable[[str], None],
    address: Callable[[], str],
) -> NodeProvider | None:
    """The provider of `health.replace_nodes`; None for "tell". Connects to nothing yet.

    Args:
        config: the setting.
        end_node: has Ray end a node, given by its id (`ray_compat.cluster.end_node`).
        address: the Ray cluster's.
    """
    if config == "tell":
        return None
    if isinstance(config, Ec2Nodes):
        from elastic.providers.ec2_nodes import Ec2Provider

        return Ec2Provider(config)
    if isinstance(config, KubeNodes):
        from elastic.providers.kube_nodes import KubeProvider

        return KubeProvider()
    if isinstance(config, LocalNodes):
        from elastic.providers.local_nodes import LocalProvider

        return LocalProvider(config, end_node, address)
    from elastic.providers.ray_nodes import RayProvider

    return RayProvider(end_node)
