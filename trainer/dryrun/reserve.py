"""What a fault may add to a worker's memory. Pure."""

from __future__ import annotations

from trainer.backend.groups import Device
from trainer.replication.lanes import deal_lanes, find_neediest, lane_buffers

_STAGED = 3
"""Buckets at once for a lane that comes back from the host: as it was there, beside the other lanes
to be sent, and as more that arrives."""


def spare_buffers(lanes: int, replicas: int, device: Device, most: int | None) -> int:
    """Gradient buffers that the first worker of a replica may need when another replica is lost in
    a step, beyond those of an undisturbed one.

    They are for lanes that were the lost replica's. On a CPU one more takes the place of the
    reduced gradient, which an abandoned collective of Gloo's may still write to.

    Args:
        lanes: of the run.
        replicas: that there are.
        device: of the workers.
        most: buffers on the device; None: as many as are needed.
    """
    if replicas == 1:
        return 0
    limit = lanes + 1 if most is None else most
    before = deal_lanes(lanes, tuple(range(replicas)))
    held = min(limit, lane_buffers(before[find_neediest(before, lanes)], lanes))
    spare = 0
    for lost in range(replicas):
        left = tuple(replica for replica in range(replicas) if replica != lost)
        dealt = deal_lanes(lanes, left, {replica: before[replica] for replica in left})
        for replica in left:
            spare = max(spare, min(limit, lane_buffers(dealt[replica], lanes)) - held)
    return spare + (device == "cpu")


def staged_bytes(
    lanes: int, replicas: int, device: Device, most: int | None, bucket_bytes: int
) -> int:
    """What lanes of a lost replica take on the device where they wait on the host.

    Args:
        lanes: of the run.
        replicas: that there are.
        device: of the workers.
        most: buffers on the device; None: as many as are needed.
        bucket_bytes: the most that is reduced at once.
    """
    needed, held = (spare_buffers(lanes, replicas, device, limit) for limit in (None, most))
    return (needed - held) * _STAGED * bucket_bytes
