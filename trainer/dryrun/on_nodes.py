"""Whether a layout goes with the machines: groups that none of them holds, and levels that are not
theirs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainer.config import ParallelConfig


class Misfit(NamedTuple):
    """A setting that does not go with the machines."""

    field: str
    """As the user writes it."""
    value: int
    """That was given."""
    fact: str
    """What of it does not."""
    fix: str
    """What to write instead."""
    refused: bool
    """On GPUs, unless a larger node can come: what is meant for NVLink goes over the network."""

    def __str__(self) -> str:
        return f"{self.field} = {self.value}: {self.fact}. {self.fix}."


def find_misfits(parallel: ParallelConfig, room: int) -> list[Misfit]:
    """What does not go with nodes the largest of which holds `room` workers."""
    found = [_misfit_of_tensor(parallel, room), _misfit_of_context(parallel, room)]
    found.append(_misfit_of_levels(parallel, room))
    return [misfit for misfit in found if misfit is not None]


def _misfit_of_tensor(parallel: ParallelConfig, room: int) -> Misfit | None:
    if parallel.tensor <= max(1, room):
        return None
    return Misfit(
        "train.parallel.tensor",
        parallel.tensor,
        f"no node holds more than {room} workers, and those of a tensor group exchange activations "
        "in every layer, over NVLink where they are on one node",
        f"Use tensor = {max(1, room)} or less and a larger shard degree, or larger nodes",
        refused=True,
    )


def _misfit_of_context(parallel: ParallelConfig, room: int) -> Misfit | None:
    """One that is only told: a sample may be too long for the workers of one node."""
    context, tensor = parallel.context, parallel.tensor
    if context == 1 or tensor > max(1, room) or context * tensor <= max(1, room):
        return None
    whose = f"{context} workers" if tensor == 1 else f"{context} x {tensor} workers"
    return Misfit(
        "train.parallel.context",
        context,
        f"no node holds more than {room} workers, and the {whose} that share a sample pass keys "
        "and values round in every layer, which will go over the network",
        f"Use context = {max(1, room // tensor)} or less and a larger shard degree where a "
        "sample's activations leave room, or larger nodes",
        refused=False,
    )


def _misfit_of_levels(parallel: ParallelConfig, room: int) -> Misfit | None:
    here, field = parallel.workers_per_node, "train.parallel.workers_per_node"
    if here is None:
        return None
    fills = room in parallel.node_sizes
    use = f"Use {room}, or None" if fills else "Use None"
    if here > max(1, room):
        return Misfit(
            field,
            here,
            f"no node holds more than {room} workers, so what two levels send inside a node would "
            "go over the network, beside what goes there anyway",
            f"{use}, or larger nodes",
            refused=True,
        )
    if parallel.workers <= room:
        fact = f"a node holds all {parallel.workers} workers of a replica: there is one level"
        return Misfit(field, here, fact, "Use None", refused=False)
    if here == room or not (fills or 2 * here <= room):
        return None
    fact = f"a node holds {room} workers: the levels are not those of the nodes"
    if not fills:
        use += ", or a shard degree with which replicas fill their nodes"
    return Misfit(field, here, fact, use, refused=False)


def describe_levels(parallel: ParallelConfig, room: int) -> str | None:
    """What two levels would change for replicas that are flat and fill their nodes, where it may
    pay; None elsewhere.

    Args:
        parallel: the layout of one replica.
        room: workers that each node holds.
    """
    if parallel.workers_per_node is not None or room not in parallel.node_sizes:
        return None
    nodes, fsdp = parallel.workers // room, parallel.dims.fsdp
    if nodes < _LEAST_NODES or parallel.dims.regathers_partly:
        return None
    return (
        f"a replica is on {nodes} nodes, in a ring of {fsdp - 1} steps: workers_per_node={room} "
        f"makes {nodes - 1} + {fsdp // nodes - 1} of them (when that pays: docs/two-levels.md)"
    )


_LEAST_NODES = 16
"""On fewer there is nothing to gain by NCCL's latencies (`benchmarks.collectives --forecast`)."""
