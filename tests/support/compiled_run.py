"""A worker of a compiled run in a process of its own, for what it leaves in the node's cache.

    python -m tests.support.compiled_run DIRECTORY [RANK PORT]

Without a rank it rehearses, else it trains beside the other of two workers. The cache is where
`TORCHINDUCTOR_CACHE_DIR` says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.data_plane import WorkerResult, train_in_one_replica
from tests.support.tiny import tiny_train
from trainer.backend import determinism
from trainer.backend.rendezvous import Rendezvous
from trainer.loop.compile_ahead import rehearse
from trainer.parallel.compiled import keep_compiled


def main(directory: Path, rank: str = "", port: str = "") -> None:
    """See above."""
    train = tiny_train(directory / "text", shard=2, steps=2, lanes=1, compile="require")
    task = train.task.prepare(train, str(directory / "cache"))
    determinism.settle(train.determinism, "cpu", os.environ)
    keep_compiled(os.environ, 1)
    if not rank:
        rehearse(task, train, lanes=1, max_replicas=1, device="cpu")
        return
    meet = Rendezvous(host="127.0.0.1", port=int(port), timeout_s=60)
    found = train_in_one_replica(int(rank), meet, task, train)
    assert isinstance(found, WorkerResult), found


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
