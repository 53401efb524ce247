"""Process groups of a replica and across replicas, on Gloo (CPU) or NCCL (CUDA).

The default group of a worker is its replica. Across replicas a raw group, unknown to c10d's
registry, is made for each generation and thrown away with it. Rendezvous goes through one TCPStore,
which the control plane hosts, under a prefix of its own for each group: no worker's death takes it
along (ray #59989, pytorch #91943).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

# FSDP2 imports it, and its functions have the default group of that moment, if there is one, as a
# default argument: imported later, it would keep a replica's group for ever.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.backend import aborts, nccl_settings
from trainer.backend.aside import GLOO, heard_while_connecting, make_aside
from trainer.backend.interface import listen_towards
from trainer.backend.polling import LEFT
from trainer.backend.rendezvous import Rendezvous
from trainer.backend.silence import Connections, limit_silence
from trainer.errors import GroupError
from trainer.parallel.layout import ParallelDims
from trainer.parallel.mesh import ReplicaMesh
from trainer.parallel.two_level import batches_begun

log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]

REPLICA, CROSS = "the replica", "the group across replicas"
"""What the flight recorder calls a replica's default group, and the groups made by hand; after it
stands the prefix that these met under, as after the names of a mesh's dimensions."""

_abandoning = threading.Lock()
_abandoned: list[tuple[Any, list[Any]]] = []
"""Groups and flights left mid-collective: dropping the last reference can block until their
timeout."""

_meshes: list[DeviceMesh] = []
"""Of the replica's group; DTensor's caches keep them, and they the group."""

_ending = threading.Lock()
"""Both who leaves the replica's group and who is told that it broke end it, on threads of their
own."""

_READING_S = 0.02
"""Who only reads numbers has ended by then: it is not taken for one who makes or leaves a group."""

_LEAVING_S = 60.0
"""For which who leaves its replica waits for aborts that have begun; they take half a second."""

_connections = Connections()
"""Of the replica's group."""

_device: Device = "cpu"
"""Of the replica's group, or of the last one."""

_aborted = threading.Event()
"""The replica's group was aborted, on NCCL."""

_batches_before = 0
"""Batches of sends and receives that had been begun when the replica's group was made."""

_cross_groups: list[Any] = []
"""Across replicas, on NCCL: those that a call ends."""


def torch_device(device: Device) -> torch.device:
    """This worker's device. Ray shows each worker only its own GPU, so that is always index 0.
    Asked for before anything else touches CUDA, which reads its environment once, and before the
    first group is made."""
    nccl_settings.limit_debug(os.environ)
    if device == "cuda":
        nccl_settings.settle(os.environ)
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device("cpu")


def device_name(device: Device) -> str:
    """This worker's GPU, as CUDA names it; empty on a CPU."""
    place = torch_device(device)
    return torch.cuda.get_device_name(place) if device == "cuda" else ""


def make_replica_group(
    rendezvous: Rendezvous,
    prefix: str,
    *,
    rank: int,
    dims: ParallelDims,
    device: Device,
    leave_now: Callable[[], bool] = lambda: False,
) -> ReplicaMesh:
    """Makes the replica c10d's default group and returns its mesh.

    All ranks of the replica call it. `prefix` must be new each time a replica is formed.

    Raises:
        RuntimeError: a peer went away meanwhile, or `leave_now` became true.
    """
    listen_towards(rendezvous.host, rendezvous.port)
    options: dict[str, Any] = {}
    place = torch_device(device)
    global _connections, _batches_before, _device
    _connections, _batches_before, _device = Connections(), batches_begun(), device
    _aborted.clear()
    if device == "cuda":
        options["device_id"] = place
    # c10d numbers groups, and the number is part of their keys in the store. One that was left
    # while it was made has used up the first number here, but not at a peer that is new.
    dist.distributed_c10d._world.group_count = 0
    heard = heard_while_connecting(leave_now, rendezvous.timeout)
    with (
        gather(rendezvous, prefix, dims.workers, leave_now) as store,
        limit_silence(rendezvous.silent_s, but_port=rendezvous.port) as _connections,
        heard,
    ):
        dist.init_process_group(
            "nccl" if device == "cuda" else GLOO,
            store=PrefixStore(prefix, store),
            rank=rank,
            world_size=dims.workers,
            timeout=rendezvous.timeout,
            **options,
        )
        _name_ranks(dist.group.WORLD, dims.workers, device)
        _describe(dist.group.WORLD, REPLICA, prefix)
        mesh = replica_mesh(dims, device, prefix)
        if device == "cuda":  # those on Gloo were made with it
            for each in _meshes:
                for group in each.get_all_groups():
                    dist.distributed_c10d._set_pg_timeout(rendezvous.timeout, group)
        return mesh


def _name_ranks(group: Any, workers: int, device: Device) -> None:
    """Names the default group's ranks to its backend. c10d leaves that list empty, and takes an
    empty one for all ranks in the process's first group alone: where a later one is split, as a
    mesh on NCCL does, torch reads past the list's end (2.13 still; pytorch pull request 192109)."""
    group._get_backend(torch.device(device)).options.global_ranks_in_group = [*range(workers)]


def replica_mesh(dims: ParallelDims, device: Device, prefix: str) -> ReplicaMesh:
    """The default group along the dimensions of a replica, with no group that nobody uses, as each
    is a communicator on NCCL; but FSDP2 wants one of those who hold equal parts where parameters
    are regathered partly, and one of a single rank beside tensor peers.

    Args:
        dims: these.
        device: of their backend.
        prefix: what the default group's ranks have met under.
    """
    make, size = partial(_named_mesh, device, prefix), dims.regathered
    cut = dims.regathers_partly  # then there are no tensor peers
    if dims.tensor == 1:
        fsdp, tensor = make({"fsdp": dims.fsdp}), None
    else:
        fsdp, tensor = _each_of(make({"fsdp": dims.fsdp, "tensor": dims.tensor}))
    return ReplicaMesh(
        fsdp=fsdp,
        tensor=tensor,
        others={name: _named_peers(device, prefix, dims, name) for name, _ in dims.others},
        regather=make({"apart": dims.fsdp // size, "regather": size}) if cut else None,
    )


def _each_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    """What it is along each dimension."""
    assert mesh.mesh_dim_names is not None
    return [mesh[name] for name in mesh.mesh_dim_names]


def _named_mesh(device: Device, prefix: str, degrees: Mapping[str, int]) -> DeviceMesh:
    """The default group's ranks as a mesh."""
    names = tuple(_named(name, prefix) for name in degrees)
    mesh = init_device_mesh(device, tuple(degrees.values()), mesh_dim_names=names)
    _meshes.append(mesh)
    return mesh


def _named_peers(device: Device, prefix: str, dims: ParallelDims, name: str) -> DeviceMesh:
    """This rank and its peers along one dimension, in a group as a mesh would make it: a mesh of
    all dimensions makes one along each."""
    degrees, named = dims.degrees, _named(name, prefix)
    place = torch.arange(dims.workers).view(*degrees.values())
    peers = place.movedim([*degrees].index(name), -1).reshape(-1, degrees[name]).tolist()
    group: Any = dist.group.WORLD
    if len(peers) > 1 and group.bound_device_id is not None:
        group = dist.split_group(split_ranks=peers, group_desc=f"mesh_{named}")
    elif len(peers) > 1:
        group, _ = dist.new_subgroups_by_enumeration(peers, group_desc=f"mesh_{named}")
    mesh = DeviceMesh.from_group(group, device, mesh_dim_names=(named,))
    _meshes.append(mesh)
    return mesh


def _named(name: str, prefix: str) -> str:
    """What a dimension of a mesh is called. DTensor's caches take meshes of the same shape and
    names for the same mesh, and would apply this process's old place in its old replica
    (docs/decisions/007)."""
    return f"{name} {prefix}"


@contextlib.contextmanager
def without_peers(dims: ParallelDims, device: Device) -> Iterator[ReplicaMesh]:
    """The default group of a replica's first worker, where the others are not there: collectives
    end at once, with whatever is in their buffers. The process may be in no group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.workers)
    try:
        yield replica_mesh(dims, device, "without peers")
    finally:
        leave_replica_group()


@contextlib.contextmanager
def gather(
    rendezvous: Rendezvous, prefix: str, size: int, leave_now: Callable[[], bool]
) -> Iterator[Store]:
    """Waits until all ranks are here, so that making a group seldom waits for one that never comes.

    Costs the store two calls of each rank: it serves all workers on one thread, so nobody asks
    again and again.

    Yields:
        A connection to the store, for the block in which the group is made.

    Raises:
        GroupError: `leave_now` became true, or a peer or the store's answer did not come in time.
    """
    with rendezvous.connection(leave_now) as store:
        here = PrefixStore(f"{prefix}/here", store)

        def meet() -> None:
            if here.add("count", 1) == size:
                here.set("all", "")
            else:
                here.wait(["all"], 2 * rendezvous.timeout)  # it is left before

        make_aside(meet, leave_now, rendezvous.timeout_s)
        yield store


def replica_connections() -> Connections:
    """Those of the replica's group, of its peers and no others."""
    return _connections


def collectives_begun() -> int:
    """Collectives that this worker has begun with others of its replica since that was formed.
    Called from any thread, ten times a second; 0 while the replica's groups are made or left."""
    if not _ending.acquire(timeout=_READING_S):
        return 0
    try:
        return _count_collectives()  # which refers to no group any more when the lock is released
    finally:
        _ending.release()


def _count_collectives() -> int:
    try:
        collectives = sum(each._get_sequence_number_for_group() for each in _mesh_backends())
        return collectives + batches_begun() - _batches_before  # of these NCCL keeps no number
    except (RuntimeError, AssertionError):  # in the making
        return 0


def _mesh_backends() -> set[Any]:
    """Those of the replica's meshes, each once."""
    return {
        group._get_backend(torch.device(mesh.device_type))
        for mesh in _meshes
        for group in mesh.get_all_groups()
    }


def leave_replica_group() -> None:
    """Closes the default group, if there is one, so that peers still waiting in it wake up: Gloo
    closes its connections when nothing refers to the group any more."""
    global _connections
    end_replica_collectives()
    if not aborts.wait_for_ends(_LEAVING_S):
        log.warning("NCCL has not ended this worker's former groups in %g s", _LEAVING_S)
    with _ending:
        _connections.left = True
        while _meshes:
            # Only torch.compile reads it; not every release has it.
            getattr(_meshes.pop(), "_pg_registry", {}).clear()
        there = dist.is_initialized()
        if there:
            dist.destroy_process_group()
    if there:
        gc.collect()
    _connections = Connections()  # not before: what is in flight may have to be woken by a call


def make_cross_groups(
    rendezvous: Rendezvous,
    prefix: str,
    *,
    rank: int,
    size: int,
    device: Device,
    leave_now: Callable[[], bool],
) -> list[Any]:
    """The groups over the same (shard, tensor) of all replicas, which c10d's registry does not
    know: two on Gloo, one on NCCL. All of those workers call it.

    NCCL communicators whose kernels start in different orders can wait for each other for ever.

    Raises:
        RuntimeError: a peer is gone, or `leave_now` became true.
    """
    names = ("all",) if device == "cuda" else ("first", "second")
    with gather(rendezvous, f"{prefix}/{names[0]}", size, leave_now) as store:
        listen_towards(rendezvous.host, rendezvous.port)

        given_up, alone = threading.Event(), _alone()

        def make() -> list[Any]:
            if alone:
                try:
                    return connect()
                except RuntimeError:  # perhaps for the memory of the former one
                    aborts.wait_for_ends(rendezvous.timeout_s / 2)
                    raise
            if not aborts.wait_for_ends(rendezvous.timeout_s / 2):  # told before others time out
                raise GroupError("NCCL has not ended this worker's former groups")
            return connect()

        def connect() -> list[Any]:
            groups = []
            _check_wanted(given_up)
            with limit_silence(rendezvous.silent_s, but_port=rendezvous.port):
                for name in names:
                    keys = PrefixStore(f"{prefix}/{name}", store)
                    group = _raw_group(keys, rendezvous.timeout, rank, size, device)
                    _name_raw_group(group, keys, name, prefix, device)
                    if device == "cuda":
                        _connect(group, size, given_up)
                    groups.append(group)
            return groups

        try:
            return make_aside(make, leave_now, rendezvous.timeout_s)
        except GroupError:
            given_up.set()
            for group in tuple(_cross_groups):  # that which is in the making: others were abandoned
                _give_up(group)
            raise


def _alone() -> bool:
    """Whether this worker is all of its replica. Then no kernels of its device wait for others but
    those of one group across replicas at a time, which all launch in one order: an abort that holds
    up a launch until some of these have ended closes no circle."""
    replica = dist.group.WORLD  # read once: a build that was given up may be leaving it on a thread
    return replica is not None and replica.size() == 1


def _raw_group(store: Store, timeout: timedelta, rank: int, size: int, device: Device) -> Any:
    if device == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _connect(group: Any, size: int, given_up: threading.Event) -> None:
    """Makes all connections of a group on NCCL, which a call ends from now on."""
    _cross_groups.append(group)
    try:
        # Else the first collective would connect, and wait for a lost peer where nothing ends it.
        group.eager_connect_single_device(torch_device("cuda"))
        _check_wanted(given_up)  # an abort does nothing while there is no communicator
        warm_up(group, size, torch_device("cuda"))
        _check_wanted(given_up)
    except BaseException:
        _give_up(group)
        raise


def _check_wanted(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise GroupError(LEFT)


def _give_up(group: Any) -> None:
    """Has a group ended that nobody will use, whether it was told to end before or not."""
    with contextlib.suppress(ValueError):
        _cross_groups.remove(group)
    aborts.give_up(group, CROSS)


def _name_raw_group(group: Any, store: Store, name: str, prefix: str, device: Device) -> None:
    """Has the flight recorder tell a raw group by `name` and the `prefix` that it met under. The
    backend keeps both; c10d sets them so for its own groups."""
    kinds = dist.ProcessGroup.BackendType
    named: Any = dist.ProcessGroup(store, group.rank(), group.size())
    kind = kinds.NCCL if device == "cuda" else kinds.GLOO
    named._register_backend(torch.device(device), kind, group)
    named._set_group_name(name)
    _describe(named, CROSS, prefix)


def _describe(group: Any, what: str, prefix: str) -> None:
    group._set_group_desc(f"{what} {prefix}")


def warm_up(group: Any, size: int, device: torch.device) -> None:
    """One collective of each kind that crosses replicas. All ranks of the group call it.

    NCCL makes the communicator at first, and connects with the first collective of each kind:
    always for an all-to-all, which is sends and receives, and without `NCCL_RUNTIME_CONNECT=0` for
    the others. It hears nothing there, so this is done where nobody's step waits for it.
    """
    numbers, others = torch.zeros(size, device=device), torch.zeros(size, device=device)
    for work in (
        group.alltoall_base(others, numbers, [], []),
        group.allreduce([numbers]),
        group._allgather_base(others, numbers[:1]),
        group.broadcast([numbers], dist.BroadcastOptions()),
    ):
        work.wait()
    numbers.tolist()  # waits for all of them


def abort_groups(*, replica: Connections | None) -> list[Future[Any]]:
    """Ends the collectives of this worker from another thread, at a call: those of the replica, and
    on NCCL those across replicas, which are polled on Gloo. Waits for nothing.

    Args:
        replica: the replica's connections, where of its peers one is gone; None: none is. They are
            looked up before the call is heard: those of the next replica are others.

    Returns:
        The ends of what was begun.
    """
    with aborts.together() as all_there:
        ends = []
        if replica is not None:
            ends = [aborts.begin(partial(_abort_replica_group, replica), REPLICA, all_there)]
        ends += aborts.abort_all(_cross_groups, CROSS, all_there)
    return ends


def end_replica_collectives() -> None:
    """Ends those of the default group, on NCCL, and waits until they have ended."""
    if _on_nccl():
        aborts.begin(partial(_abort_replica_group, _connections), REPLICA).result()


def _abort_replica_group(connections: Connections) -> None:
    if _device == "cpu":  # whatever a dataset does on a GPU
        # Gloo waits for a machine that is gone, and destroying the group does, too, with the lock.
        connections.cut()
    with _ending:
        if _on_nccl() and not connections.left:
            _aborted.set()
            names = tuple(dist.distributed_c10d._world.pg_names.items())
            with aborts.together() as all_there:
                ends = [
                    aborts.begin(group.abort, f"group {name} of {REPLICA}", all_there)
                    for group, name in names
                ]
            for end in ends:
                end.result()
            # It would abort one after the other; by now they have ended, and are forgotten.
            dist.distributed_c10d._abort_process_group()


def _on_nccl() -> bool:
    """Whether there is a replica's group, and it needs to be told."""
    return dist.is_initialized() and dist.get_backend() == "nccl"


def check_replica_group() -> None:
    """Called after the host has waited for a collective of the default group: those of an aborted
    NCCL group end without an error, with anything in their buffers.

    Raises:
        GroupError: it was aborted.
    """
    if _aborted.is_set():
        raise GroupError("the replica's group was aborted, as a peer is gone")


def let_go_of_ended() -> None:
    """Frees what was left mid-collective and has ended since: its buffers may be as large as the
    gradient."""
    if not _abandoned:
        return
    with _abandoning:
        done = [e for e in _abandoned if all(flight.work.is_completed() for flight in e[1])]
        _abandoned[:] = [entry for entry in _abandoned if entry not in done]


def abandon(group: Any, in_flight: list[Any]) -> bool:
    """Gives up a raw group without waiting for what is still `in_flight` in it: each a `Flight`,
    with its work and buffers.

    Returns:
        Whether they write to no buffer any more when the device has done what it was given: NCCL's
        abort ends its kernels. Those of Gloo go on, on threads of its own.
    """
    if group in _cross_groups:
        _cross_groups.remove(group)
        aborts.leave(group, CROSS)
        return True
    let_go_of_ended()
    with _abandoning:
        if in_flight:
            _abandoned.append((group, in_flight))
    return all(flight.work.is_completed() for flight in in_flight)
