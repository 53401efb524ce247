"""How often a step waits for the device. Counted on the CPU, where such a call costs nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.data_plane import train_at
from tests.support.fabric import GLOO
from tests.support.tiny import tiny_task, tiny_train, write_text
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous, close_connections

ASKS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy", "nonzero")
"""What waits for the device, of a tensor that is there."""

IN_COMMIT = 1
"""The norm and the losses. What all replicas agree on is one more, where there are several."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of those, by the last file that is ours or transformers'."""
    import traceback

    found = Counter[str]()

    def counting(name: str) -> Any:
        real = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = traceback.extract_stack(limit=2)[0]
            found[f"{Path(caller.filename).name}:{caller.name} {name}"] += 1
            return real(self, *args, **kwargs)

        return call

    for name in ASKS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return found


def test_a_step_waits_in_the_commit_alone(tmp_path: Path, asked: Counter[str]) -> None:
    """However many micro-batches it has."""
    text = write_text(tmp_path / "text")
    task = tiny_task(text)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    counts = {}
    runs = [(steps, micro_batch) for steps in (1, 3) for micro_batch in (4, 1)]
    for formation, (steps, micro_batch) in enumerate(runs):
        train = tiny_train(
            text, task=task, steps=steps, micro_batch=micro_batch, lanes=1, bucket_bytes=1024
        )
        prepared = task.prepare(train, str(tmp_path / "cache"))
        asked.clear()
        train_at(0, formation, meet, GLOO, prepared, train, 1, 1, False)
        leave_replica_group()
        counts[steps, micro_batch] = asked.total()
    close_connections()
    for micro_batch in (4, 1):  # the start and the evaluation aside
        assert (counts[3, micro_batch] - counts[1, micro_batch]) / 2 <= IN_COMMIT, asked
