"""What a fault may add to a worker's memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.backend.groups import Device
from trainer.replication.lanes import blocks_of, deal_lanes


def spare_buffers(lanes: int, replicas: int, device: Device) -> int:
    """Gradient buffers that the first worker of a replica may need when another replica is lost in
    a step, beyond those of an undisturbed one.

    They are for lanes that were the lost replica's. On a CPU one more takes the place of the
    reduced gradient, which an abandoned collective of Gloo's may still write to.

    Args:
        lanes: of the run.
        replicas: that there are.
        device: of the workers.
    """
    if replicas == 1:
        return 0
    before = deal_lanes(lanes, tuple(range(replicas)))
    most = 0
    for lost in range(replicas):
        left = tuple(replica for replica in range(replicas) if replica != lost)
        dealt = deal_lanes(lanes, left, {replica: before[replica] for replica in left})
        for replica in left:
            more = lane_buffers(dealt[replica], lanes) - lane_buffers(before[0], lanes)
            most = max(most, more)
    return most + (device == "cpu")


def lane_buffers(dealt: Iterable[int], lanes: int) -> int:
    """The most buffers that a replica needs at once, its lanes computed in their order: those of
    the whole subtrees before, and one for the lane that is open. One of them is the reduced
    gradient's, which it has without a lane, too."""
    order = list(dealt)
    return max((len(blocks_of(order[:done], lanes)) + 1 for done in range(len(order))), default=1)
