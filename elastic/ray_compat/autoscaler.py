"""Whether an autoscaler could bring a cluster what it does not have.

Ray tells nobody directly. What it tells: whether `ray.init` made the cluster, which then has no
autoscaler; and what its monitor last wrote down, where nodes that nobody scales have types of their
own names.
"""

from __future__ import annotations

import json
from typing import Any

import ray
from ray.experimental import internal_kv

_STATUS = "__autoscaling_status"
_METADATA = "CLUSTER_METADATA"
_METADATA_NAMESPACE = "cluster"


def may_bring_nodes() -> bool:
    """Whether nodes may still come by themselves; True where that is not known."""
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    if is_autoscaler_v2(fetch_from_server=True):
        return True
    return decide_scaled(
        _read(_METADATA, namespace=_METADATA_NAMESPACE), _read(_STATUS, namespace=None)
    )


def resources_per_node() -> list[dict[str, float]]:
    """What each live node has, free or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def most_on_a_node(resource: str) -> float:
    """What the live node with the most of a resource has of it, free or not."""
    return max((float(node.get(resource, 0.0)) for node in resources_per_node()), default=0.0)


def decide_scaled(metadata: dict[str, Any], status: dict[str, Any]) -> bool:
    """Whether somebody may scale a cluster, by what Ray has written down of it."""
    if metadata.get("ray_init_cluster"):
        return False
    types = (status.get("autoscaler_report") or {}).get("node_type_mapping")
    return not types or any(kind != f"node_{node}" for node, kind in types.items())


def _read(key: str, namespace: str | None) -> dict[str, Any]:
    told = internal_kv._internal_kv_get(key, namespace=namespace)
    return json.loads(told) if told else {}
