"""What Ray 2.60 wrote down of a cluster of each kind."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.ray_compat.autoscaler import decide_scaled

NODE = "f" * 51 + "00000"


def report(**types: str) -> dict[str, Any]:
    return {"monitor_pid": 1, "autoscaler_report": {"node_type_mapping": types}}


@pytest.mark.parametrize(
    ("metadata", "status", "scaled"),
    [
        ({"ray_init_cluster": True}, {}, False),
        ({"ray_init_cluster": False}, report(**{NODE: f"node_{NODE}"}), False),
        ({"ray_init_cluster": False}, report(**{NODE: "ray.head.default"}), True),
        ({"ray_init_cluster": False}, {"monitor_pid": 1, "load_metrics_report": {}}, True),
        ({"ray_init_cluster": False}, report(), True),
        ({}, {}, True),
    ],
)
def test_nodes_may_come_unless_it_is_known_that_none_will(
    metadata: dict[str, Any], status: dict[str, Any], scaled: bool
) -> None:
    assert decide_scaled(metadata, status) is scaled
