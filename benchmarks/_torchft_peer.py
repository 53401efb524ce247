"""The toy run with torchft: each worker is a replica group of its own.

    python -m benchmarks._torchft_peer TRACES RANK STEP_S

As in torchft's own `train_ddp.py`: Manager, ProcessGroupGloo with a timeout of 5 s, Optimizer. Only
the gradients are averaged by `manager.allreduce` of one flat buffer, not by its
DistributedDataParallel: in 0.2.0 that one ends the survivors too, by a failed assertion
(`fut._fut` in ddp.py) when the all-reduce of a bucket fails. It runs until it is ended. The
launcher (recovery.py) plays torchx: it starts one lighthouse and the workers, and a killed worker
again at once.

What to expect: the killed worker's neighbours in Gloo's ring fail at once; the third survivor waits
for the group's timeout. Two of four are no majority, so the quorum waits for it, or for the
replacement.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks._toy import BATCH, PacedLoss, Trace, build_model, dataset


def main(traces: str, rank: int, step_s: float) -> None:
    """One worker; the address of the lighthouse is in TORCHFT_LIGHTHOUSE."""
    torch.set_num_threads(1)
    model = build_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load_state_dict(state: Any) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        replica_id=f"bench_{rank}",
        timeout=timedelta(seconds=30),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    optimizer, params = Optimizer(manager, adam), list(model.parameters())
    points, classes = dataset().tensors
    loss_function, trace = PacedLoss(step_s), Trace(traces, rank)
    while True:
        step = manager.current_step()
        first = (step * 4 + rank) * BATCH % (len(points) - BATCH)
        chosen = slice(first, first + BATCH)
        optimizer.zero_grad()
        loss, terms = loss_function(model, (points[chosen], classes[chosen]))
        (loss / terms).backward()
        flat = _flatten_dense_tensors([param.grad for param in params])
        manager.allreduce(flat).wait()
        for param, mean in zip(params, _unflatten_dense_tensors(flat, params), strict=True):
            param.grad = mean
        optimizer.step()
        if manager.current_step() > step:
            trace.add(manager.current_step() - 1, manager.num_participants())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
