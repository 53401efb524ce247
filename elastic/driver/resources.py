"""Waits until a cluster has room for a run, and decides how many workers it starts with."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from elastic.config import ScalingConfig, WorkerPlan, plan_workers
from elastic.errors import ResourcesError
from elastic.ray_compat.autoscaler import may_bring_nodes, most_on_a_node, resources_per_node
from elastic.ray_compat.cluster import available_per_node
from elastic.ray_compat.groups import Demand
from trainer.capability import BFLOAT16, FLOAT8, all_older
from trainer.config import ParallelConfig, TrainConfig
from trainer.dryrun.machines import count_sharing
from trainer.dryrun.on_nodes import find_misfits
from trainer.errors import ConfigError
from trainer.float8.config import Float8

log = logging.getLogger(__name__)

_INTERVAL_S = 0.5


def wait_for_workers(scaling: ScalingConfig, parallel: ParallelConfig) -> WorkerPlan:
    """Waits up to `scaling.wait_s` for the resources of the smallest layout; takes what there is
    then. Meanwhile Ray's autoscaler is asked for them. From the return on they are anybody's, until
    the run takes them: see `PlacementGroups.wait`.

    Raises:
        ResourcesError: not even the smallest layout fits.
    """
    deadline = time.monotonic() + scaling.wait_s
    demand = Demand([scaling.resources_per_worker] * (scaling.min_replicas * parallel.workers))
    told = False
    try:
        while True:
            nodes = [*demand.placed(), *available_per_node()]
            there = {
                name: sum(n.get(name, 0.0) for n in nodes) for name in scaling.resources_per_worker
            }
            fitting = sum(count_fitting(scaling, node) for node in nodes)
            plan = plan_workers(scaling, parallel, fitting)
            if plan is not None:
                return plan
            if time.monotonic() >= deadline:
                raise _too_little(scaling, parallel, _describe(there, fitting))
            if not told:
                log.warning("%s; waiting", _describe(there, fitting))
                told = True
            demand.ask()
            time.sleep(_INTERVAL_S)
    finally:
        demand.withdraw()


def check_device(scaling: ScalingConfig) -> None:
    """Raises ConfigError for GPUs on a cluster that has none, and that no autoscaler can bring
    one. This process has joined it."""
    if scaling.device == "cuda" and not most_on_a_node("GPU") and not may_bring_nodes():
        raise ConfigError(
            "scaling.device",
            scaling.device,
            "no node of the cluster has a GPU, and there is no autoscaler that could bring one",
            "Use 'cpu', or add nodes with GPUs (Ray counts them: `ray status`)",
        )


def check_kinds(train: TrainConfig, kinds: Sequence[str]) -> None:
    """What no GPU of the cluster can compute is refused before anything starts. Where some can, or
    may come, each worker asks its own. Pure.

    Args:
        train: what is asked for.
        kinds: Ray's names of the cluster's GPUs.

    Raises:
        ConfigError: all of them are too old for it.
    """
    there = f"the cluster's GPUs are {', '.join(kinds)}, and"
    if train.precision == "bfloat16" and all_older(kinds, BFLOAT16):
        raise ConfigError(
            "train.precision",
            train.precision,
            f"{there} bfloat16 needs A100, L4 or newer ones",
            "Use 'float32', or other machines",
        )
    for converter in train.converters:
        if isinstance(converter, Float8) and all_older(kinds, FLOAT8):
            raise ConfigError(
                "train.converters",
                converter,
                f"{there} an 8-bit product needs L4, H100 or newer ones",
                "Leave it out, or use other machines",
            )


def find_unused(scaling: ScalingConfig, train: TrainConfig, gpus: float) -> list[str]:
    """What defaults leave unused of machines that are paid for, a sentence each: they may be meant
    so. Pure.

    Args:
        scaling: what workers compute on.
        train: in which precision.
        gpus: of the node with the most of them.
    """
    if scaling.device == "cpu" and gpus:
        return [
            "scaling.device = 'cpu': the cluster has GPUs, and no worker will use one. "
            "Use device='cuda'"
        ]
    if scaling.device == "cuda" and (train.precision, train.determinism) == ("float32", "strict"):
        return [
            "train.precision = 'float32': determinism='strict' takes no TF32, and matrix products "
            "have about an eighth of its speed. Use precision='bfloat16', or determinism='fast'"
        ]
    return []


def find_lacking(scaling: ScalingConfig, parallel: ParallelConfig, room: int) -> str | None:
    """Which spares will not be there; None: all will. Pure.

    Args:
        scaling: how many are wanted.
        parallel: how many workers a replica has.
        room: workers that the cluster's nodes hold, whoever uses them now.
    """
    slots = scaling.slots(parallel)
    lacking = min(scaling.spares, slots + scaling.spares - room)
    if lacking <= 0:
        return None
    return (
        f"scaling.spares = {scaling.spares}: {lacking} of them will not be there: the cluster has "
        f"room for {room} workers, with {_list(scaling.resources_per_worker)} each, and "
        f"{slots} train. Add nodes (or start Ray with a larger --num-cpus), or use "
        f"spares={scaling.spares - lacking}"
    )


def find_idle(scaling: ScalingConfig, parallel: ParallelConfig, rooms: Sequence[int]) -> str | None:
    """Which workers wait for their like where nodes of unequal size are not cut in whole groups;
    None: none do. As membership forms replicas: beyond `min_replicas` of whole groups alone. Pure.

    Args:
        scaling: how many replicas are wanted.
        parallel: which of their workers are to be on one node.
        rooms: workers that each node holds.
    """
    together, size = parallel.dims.together, parallel.workers
    if max(rooms, default=0) < together:  # then none are waited for
        return None
    wanted = min(scaling.max_replicas, sum(rooms) // size)
    whole = sum(room // together for room in rooms) // (size // together)
    idle = (wanted - max(whole, min(scaling.min_replicas, wanted))) * size
    if idle <= 0:
        return None
    field = "tensor" if parallel.workers_per_node is None else "workers_per_node"
    nodes = ", ".join(f"{count} of {room}" for room, count in sorted(Counter(rooms).items()))
    return (
        f"train.parallel.{field} = {together}: {idle} workers will be idle. So many of a replica "
        f"are to be on one node, and the nodes (by workers: {nodes}) hold such groups for {whole} "
        f"of {wanted} replicas. Use a number that divides what each node holds, or nodes that hold "
        "a multiple of it"
    )


def check_nodes(scaling: ScalingConfig, parallel: ParallelConfig) -> None:
    """Warns where the layout does not go with the nodes there are: they do not hold a group whose
    workers talk in every layer, are other than the levels it is gathered in, or leave workers idle
    that find no whole group. This process has joined the cluster.

    Raises:
        ConfigError: on GPUs no node holds what is meant for NVLink, and no autoscaler could bring
            one that does.
    """
    rooms = [count_fitting(scaling, node) for node in resources_per_node()]
    for misfit in find_misfits(parallel, max(rooms, default=0)):
        if misfit.refused and scaling.device == "cuda" and not may_bring_nodes():
            raise ConfigError(misfit.field, misfit.value, misfit.fact, misfit.fix)
        log.warning("%s", misfit)
    if told := find_idle(scaling, parallel, rooms):
        log.warning("%s", told)


def check_spares(scaling: ScalingConfig, parallel: ParallelConfig) -> None:
    """Warns where the nodes have no room for the spares, and no autoscaler could bring any. To be
    called when the start has waited for nodes."""
    room = sum(count_fitting(scaling, node) for node in resources_per_node())
    if (told := find_lacking(scaling, parallel, room)) and not may_bring_nodes():
        log.warning("%s", told)


def count_fitting(scaling: ScalingConfig, there: dict[str, float]) -> int:
    """Workers that the free resources of one node hold."""
    needs = scaling.resources_per_worker
    fitting = [
        count_sharing(there.get(name, 0.0), amount)
        if name == "GPU"
        else math.floor(there.get(name, 0.0) / amount + 1e-9)
        for name, amount in needs.items()
        if amount
    ]
    return min(fitting, default=0)


def _describe(there: dict[str, float], fitting: int) -> str:
    """What is free in all, and the workers that fit: each is on one node, and on one GPU, so that
    they may be fewer than the sum makes believe."""
    return f"the cluster has free {_list(there)}, room for {fitting} of this run's workers"


def _list(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _too_little(scaling: ScalingConfig, parallel: ParallelConfig, there: str) -> ResourcesError:
    workers = scaling.min_replicas * parallel.workers
    return ResourcesError(
        f"{workers} workers ({scaling.min_replicas} replicas x {parallel.dims}) with "
        f"{_list(scaling.resources_per_worker)} each",
        there,
        scaling.wait_s,
        "Add nodes (or start Ray with a larger --num-cpus), raise scaling.wait_s where an "
        "autoscaler brings them, lower scaling.min_replicas, or lower scaling.cpus_per_worker",
    )
