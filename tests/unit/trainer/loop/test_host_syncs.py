"""How often a step waits for the device. Counted on the CPU, where such a call costs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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

ASKS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy", "nonzero", "equal")
"""What waits for the device, of a tensor that is there. A `copy_` to the host does, too: on a CPU
it is as any other."""
WAITS = ((torch, "equal"), (torch.cpu, "synchronize"), (torch.cuda, "synchronize"))
"""And functions that wait for it."""

IN_COMMIT = 1
"""The norm and the losses. What all replicas agree on is one more, where there are several."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of those, by the last file that is ours or transformers'."""
    import traceback

    found = Counter[str]()

    def counting(owner: Any, name: str, counts: Callable[..., bool]) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if counts(*args):
                caller = traceback.extract_stack(limit=2)[0]
                found[f"{Path(caller.filename).name}:{caller.name} {name}"] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ASKS:
        counting(torch.Tensor, name, lambda *_: True)
    for owner, name in WAITS:
        counting(owner, name, lambda *_: True)
    # By this name it is the host, whatever the device.
    counting(torch.Tensor, "to", lambda tensor, where=None, *_: where == "cpu")
    return found


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.to("cpu", copy=True),
        lambda tensor: torch.equal(tensor, tensor),
        lambda tensor: tensor.equal(tensor),
        lambda tensor: torch.get_device_module(tensor.device).synchronize(),
    ],
)
def test_what_waits_is_counted(asked: Counter[str], wait: Callable[[torch.Tensor], Any]) -> None:
    tensor = torch.ones(1)
    tensor.to(tensor.device)
    assert asked.total() == 0
    wait(tensor)
    assert asked.total() == 1


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
