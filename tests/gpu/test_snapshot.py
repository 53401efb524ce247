"""A copy of the state in shared memory, pinned on CUDA, outlives the process that made it."""

from __future__ import annotations

import hashlib
import json
import os

import torch.distributed as dist

from tests.support.data_plane import make_engine
from tests.support.fabric import GLOO, NCCL, Fabric, on
from tests.support.member import small_task, small_train
from tests.support.processes import PATIENCE, TIMEOUT_S, lose_itself, play
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.host_copy import HostBuffer
from trainer.engine.shared_copy import open_copy


def hold(port: int, fabric: Fabric, store: dist.TCPStore) -> None:
    """Makes a copy, changes the state, and is killed once the copy is open elsewhere."""
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    engine = make_engine(0, meet, small_task(), small_train(1), device=fabric.device)
    share = engine.state.share(0, 1)
    whole = hashlib.sha256()
    for tensor in share.tensors:
        whole.update(tensor.cpu().numpy().tobytes())
    buffer = HostBuffer(share.size_bytes, engine.device)
    copy = engine.state.copy_to(buffer, share)
    engine.gradient.normal_()
    engine.apply(0, scale=1.0)
    copy.wait()
    stretches = [(p, t.nbytes) for p, t in zip(share.places, share.tensors, strict=True)]
    told = (os.getpid(), buffer.fd, buffer.number, stretches, whole.hexdigest())
    store.set("copy", json.dumps(told))
    store.wait(["open"], PATIENCE)
    lose_itself("SIGKILL")


def read(store: dist.TCPStore) -> None:
    """Reads what the dead has left."""
    store.wait(["copy"], PATIENCE)
    pid, fd, number, stretches, expected = json.loads(store.get("copy"))
    with open_copy(pid, fd, number) as memory:
        store.set("open", "")
        store.wait(["died"], PATIENCE)
        whole = hashlib.sha256()
        for place, size in stretches:
            whole.update(memory[place : place + size])
    assert whole.hexdigest() == expected
    store.set("read", "")


def live(number: int, port: int, fabric: Fabric) -> None:
    """One of the two processes."""
    fabric.enter(0, 1)
    store = dist.TCPStore("127.0.0.1", port)
    read(store) if number else hold(port, fabric, store)


@on(GLOO, NCCL)
def test_a_snapshot_outlives_the_worker_that_made_it(fabric: Fabric) -> None:
    assert play(live, fabric, processes=2, dies=0).check(["read"])
