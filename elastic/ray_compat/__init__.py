"""Everything that leans on Ray's internals, in one place. Checked on Ray 2.60.

- `cluster.py`: nodes, and actors on them.
- `groups.py`: the placement groups of a run.
- `workers.py`: a worker group in which workers come and go one by one.
- `controller.py`: the controller that polls them, and the policy that ends a run.
- `trainer.py`: puts both where `DataParallelTrainer` would make its own.
"""

from elastic.ray_compat.cluster import (
    available_per_node,
    draining_nodes,
    host_store,
    live_nodes,
    on_every_node,
    start_actor,
    started_anew,
)
from elastic.ray_compat.trainer import ElasticRayTrainer

__all__ = [
    "ElasticRayTrainer",
    "available_per_node",
    "draining_nodes",
    "host_store",
    "live_nodes",
    "on_every_node",
    "start_actor",
    "started_anew",
]
