"""Everything that leans on Ray's internals, in one place. Checked on Ray 2.60.

- `cluster.py`: nodes, and actors on them.
- `groups.py`: the placement groups of a run.
- `workers.py`: a worker group in which workers come and go one by one.
- `controller.py`: the controller that polls them, and the policy that ends a run.
- `trainer.py`: puts both where `DataParallelTrainer` would make its own.

Nothing is imported here: a node agent needs `cluster.py`, and Ray Train would cost it a second.
"""
