"""Process groups of a replica and across replicas, on Gloo (CPU) or NCCL (CUDA).

The default group of a worker is its replica. Across replicas a raw group, unknown to c10d's
registry, is made for each generation and thrown away with it. Rendezvous goes through one TCPStore,
which the control plane hosts, under a prefix of its own for each group: no worker's death takes it
along (ray #59989, pytorch #91943).
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.backend.interface import listen_towards
from trainer.backend.silence import limit_silence

Device = Literal["cpu", "cuda"]

_POLL_MIN_S, _POLL_MAX_S = 20e-6, 500e-6
_CONNECT_TIMEOUT_S = 5.0

_abandoned: list[tuple[Any, list[Any]]] = []
"""Groups and works left mid-collective: dropping the last reference can block until their
timeout."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where process groups meet."""

    host: str
    """Address of the control plane's TCPStore."""
    port: int
    """Its port."""
    timeout_s: float
    """Bound on rendezvous and on every collective."""
    silent_s: float = 30.0
    """A peer in the replica whose machine acknowledges nothing for so long is given up."""

    def store(self, prefix: str) -> Store:
        """A connection to the store that sees only keys below `prefix`."""
        store = TCPStore(self.host, self.port, is_master=False, timeout=self.timeout)
        return PrefixStore(prefix, store)

    def reachable(self) -> bool:
        """Whether the store's host answers."""
        try:
            socket.create_connection((self.host, self.port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    @property
    def timeout(self) -> timedelta:
        """`timeout_s` as torch wants it."""
        return timedelta(seconds=self.timeout_s)


def torch_device(device: Device) -> torch.device:
    """This worker's device. Ray shows each worker only its own GPU, so that is always index 0."""
    if device == "cuda":
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device("cpu")


def make_replica_group(
    rendezvous: Rendezvous,
    prefix: str,
    *,
    rank: int,
    shard: int,
    tensor: int,
    device: Device,
    leave_now: Callable[[], bool] = lambda: False,
) -> DeviceMesh:
    """Makes the replica c10d's default group and returns its mesh, shard x tensor.

    All ranks of the replica call it. `prefix` must be new each time a replica is formed.

    Raises:
        RuntimeError: a peer went away meanwhile, or `leave_now` became true.
    """
    gather(rendezvous, prefix, rank, shard * tensor, leave_now)
    listen_towards(rendezvous.host, rendezvous.port)
    options: dict[str, Any] = {}
    if device == "cuda":
        # A failed collective must end in an exception here, not in the end of the process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options["device_id"] = torch_device(device)
    # DTensor's caches take meshes of the same shape and names for the same mesh, and would apply
    # this process's old place in its old replica (docs/decisions/007).
    names = (f"shard {prefix}", f"tensor {prefix}")
    with limit_silence(rendezvous.silent_s):
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=rendezvous.store(prefix),
            rank=rank,
            world_size=shard * tensor,
            timeout=rendezvous.timeout,
            **options,
        )
        return init_device_mesh(device, (shard, tensor), mesh_dim_names=names)


def gather(
    rendezvous: Rendezvous, prefix: str, rank: int, size: int, leave_now: Callable[[], bool]
) -> None:
    """Waits until all ranks are here, so that making a group cannot wait for one that never comes.

    Raises:
        RuntimeError: `leave_now` became true, or a peer did not come in time.
    """
    # A store whose host is gone would be looked for until the timeout, deaf to a call to leave.
    poll_until(rendezvous.reachable, leave_now, rendezvous.timeout_s)
    store = rendezvous.store(f"{prefix}/here")
    store.set(str(rank), "here")
    peers = [str(peer) for peer in range(size)]
    poll_until(lambda: bool(store.check(peers)), leave_now, rendezvous.timeout_s)


def poll_until(done: Callable[[], bool], leave_now: Callable[[], bool], timeout_s: float) -> None:
    """Polls `done`, ever less often, down to twice a millisecond.

    Raises:
        RuntimeError: `leave_now` became true, or the time is over.
    """
    pause, deadline = _POLL_MIN_S, time.monotonic() + timeout_s
    while not done():
        if leave_now():
            raise RuntimeError("left for a regroup")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"a peer did not come within {timeout_s:g} s (health.collective_timeout_s)"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_MAX_S)


def leave_replica_group() -> None:
    """Closes the default group, if there is one, so that peers still waiting in it wake up."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    gc.collect()


def make_cross_groups(
    rendezvous: Rendezvous, prefix: str, *, rank: int, size: int, device: Device
) -> list[Any]:
    """The groups over the same (shard, tensor) of all replicas: two on Gloo, one on NCCL. All of
    those workers call it.

    NCCL communicators whose kernels start in different orders can wait for each other for ever.
    """
    names = ("all",) if device == "cuda" else ("first", "second")
    return [
        make_raw_group(rendezvous, f"{prefix}/{name}", rank=rank, size=size, device=device)
        for name in names
    ]


def make_raw_group(
    rendezvous: Rendezvous, prefix: str, *, rank: int, size: int, device: Device
) -> Any:
    """A process group that c10d's registry does not know. All its ranks call it."""
    store = rendezvous.store(prefix)
    if device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = rendezvous.timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, rendezvous.timeout)


def abandon(group: Any, in_flight: list[Any]) -> None:
    """Gives up a raw group without waiting for the works and buffers still `in_flight` in it."""
    if dist.is_nccl_available() and isinstance(group, dist.ProcessGroupNCCL):
        group.abort()
        return
    _abandoned[:] = [(g, w) for g, w in _abandoned if not all(work.is_completed() for work, _ in w)]
    if in_flight:
        _abandoned.append((group, in_flight))
