"""What a fault may add to a worker's memory. Pure."""

from __future__ import annotations

from trainer.backend.groups import Device
from trainer.replication.lanes import deal_lanes, lane_buffers


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
    held = min(limit, lane_buffers(before[0], lanes))
    spare = 0
    for lost in range(replicas):
        left = tuple(replica for replica in range(replicas) if replica != lost)
        dealt = deal_lanes(lanes, left, {replica: before[replica] for replica in left})
        for replica in left:
            spare = max(spare, min(limit, lane_buffers(dealt[replica], lanes)) - held)
    return spare + (device == "cpu")
