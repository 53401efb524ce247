"""Where a worker begins. Light, so that the supervisor, which names it, carries no torch."""

from __future__ import annotations

from typing import Any

from elastic.imports import uncollected


def train_worker(config: dict[str, Any]) -> None:
    """The train function that Ray Train calls on every worker, with the Job in `config["job"]`."""
    with uncollected():
        from elastic.worker.worker import Worker

        worker = Worker(config["job"])
    worker.run()
