"""A compiled run in a process of its own, for what it leaves in the node's cache.

    python -m tests.support.compiled_run rehearse|train DIRECTORY

`TORCHINDUCTOR_CACHE_DIR` says where that is: a forked process has its parent's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.support.data_plane import WorkerResult, run_layout
from tests.support.tiny import tiny_train, write_text
from trainer.backend import determinism
from trainer.loop.compile_ahead import rehearse
from trainer.parallel.compiled import keep_compiled


def main(what: str, directory: Path) -> None:
    """Rehearses as one worker of two, or trains as both."""
    text = directory / "text"
    if not text.exists():
        write_text(text)
    train = tiny_train(text, shard=2, steps=2, lanes=1, compile="require")
    task = train.task.prepare(train, str(directory / "cache"))
    if what == "train":
        found = run_layout(task, train, replicas=1, lanes=1)
        assert all(isinstance(worker, WorkerResult) for worker in found), found
        return
    torch.set_num_threads(1)  # as the workers have; their number is part of the code
    determinism.settle(train.determinism, "cpu", os.environ)
    keep_compiled(os.environ, 1)
    rehearse(task, train, lanes=1, max_replicas=1, device="cpu")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
