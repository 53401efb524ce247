"""What all-gathers and reduce-scatters should take, by latency and bandwidth. Pure.

A flat ring over n nodes with g workers each makes n * g - 1 steps, two levels n - 1 across nodes
and g - 1 inside; both send the same bytes over a node's network. What is assumed of a network was
written down before anything was measured (docs/two-levels.md says whose assumptions they are).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.parallel.two_level import ROUNDS


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A cluster's network."""

    alpha_s: float
    """Of a step between nodes."""
    inside_alpha_s: float
    """Of a step inside a node."""
    node_bytes_s: float
    """That a node sends."""
    inside_bytes_s: float
    """That a worker sends inside its node."""


P4D = Fabric(alpha_s=20e-6, inside_alpha_s=15e-6, node_bytes_s=0.9 * 50e9, inside_bytes_s=240e9)
"""20 µs a step, which the planner's facts give for the steps of two levels, and 15 µs over NVLink;
400 Gbit/s, of which nine tenths are our own guess."""

P4D_HOPS = Fabric(
    alpha_s=14e-6, inside_alpha_s=3.4e-6, node_bytes_s=0.9 * 50e9, inside_bytes_s=240e9
)
"""With the latencies that NCCL reckons with for a ring's hops (`tuning.cc`, Simple protocol): the
case against us, for `ring_of_hops_s`."""

BLOCKS = {"7b": 202_383_360, "13b": 317_204_480, "70b": 855_654_400}
"""Parameters in a block of Llama 2."""


def ring_s(nodes: int, here: int, size_bytes: float, fabric: Fabric) -> float:
    """A flat ring all of whose steps take a step's latency between nodes.

    Args:
        nodes: n.
        here: workers on each, g.
        size_bytes: of the whole buffer.
        fabric: the network.
    """
    return (nodes * here - 1) * fabric.alpha_s + _across_s(nodes, size_bytes, fabric)


def ring_of_hops_s(nodes: int, here: int, size_bytes: float, fabric: Fabric) -> float:
    """A flat ring whose steps inside a node wait for none between nodes."""
    inside_s = nodes * (here - 1) * fabric.inside_alpha_s
    return (nodes - 1) * fabric.alpha_s + inside_s + _across_s(nodes, size_bytes, fabric)


def two_level_s(nodes: int, here: int, size_bytes: float, fabric: Fabric) -> float:
    """Two levels, of which what the last round hands on inside the node is not hidden."""
    latency_s = (nodes - 1) * fabric.alpha_s + (here - 1) * fabric.inside_alpha_s
    rounds = max(1, min(ROUNDS, nodes - 1))
    inside_s = size_bytes * (here - 1) / here / rounds / fabric.inside_bytes_s
    return latency_s + _across_s(nodes, size_bytes, fabric) + inside_s


def _across_s(nodes: int, size_bytes: float, fabric: Fabric) -> float:
    return size_bytes * (nodes - 1) / nodes / fabric.node_bytes_s


def forecast(gpus: int, per_node: int = 8) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds and gains for one block of each model, sharded over all GPUs of p4d.

    `all_gather`: in bfloat16, the planner's block (its reduce-scatter is as large).
    `reduce_scatter`: in float32, as here. `block`: two of the former and one of the latter, a
    micro-batch's. `hops`: the all-gather as NCCL reckons.
    """
    nodes = gpus // per_node
    found = {}
    for name, parameters in BLOCKS.items():
        sizes = {"all_gather": 2.0 * parameters, "reduce_scatter": 4.0 * parameters}
        flat = {kind: ring_s(nodes, per_node, size, P4D) for kind, size in sizes.items()}
        two = {kind: two_level_s(nodes, per_node, size, P4D) for kind, size in sizes.items()}
        for times in (flat, two):
            times["block"] = 2 * times["all_gather"] + times["reduce_scatter"]
        size = sizes["all_gather"]
        flat["hops"] = ring_of_hops_s(nodes, per_node, size, P4D_HOPS)
        two["hops"] = two_level_s(nodes, per_node, size, P4D_HOPS)
        found[name] = {kind: _compared(flat[kind], two[kind]) for kind in flat}
    return found


NODES = (2, 4, 6, 8, 16, 32, 64, 128)
"""That a replica may be on."""


def gains_by_nodes(per_node: int = 8) -> dict[str, dict[str, float]]:
    """By nodes of a replica on p4d, what a micro-batch's collectives of a block gain: by the
    planner's latencies under the model's name, by NCCL's own with `hops`. Below 1: a loss."""
    found: dict[str, dict[str, float]] = {}
    for nodes in NODES:
        row = found[str(nodes)] = {}
        for name, parameters in BLOCKS.items():
            buffers = (2.0 * parameters, 2.0 * parameters, 4.0 * parameters)
            for suffix, ring, fabric in (("", ring_s, P4D), (" hops", ring_of_hops_s, P4D_HOPS)):
                flat_s = sum(ring(nodes, per_node, size, fabric) for size in buffers)
                two_s = sum(two_level_s(nodes, per_node, size, fabric) for size in buffers)
                row[f"{name}{suffix}"] = round(flat_s / two_s, 2)
    return found


def _compared(flat_s: float, two_s: float) -> dict[str, float]:
    return {
        "flat_ms": round(1e3 * flat_s, 2),
        "two_level_ms": round(1e3 * two_s, 2),
        "gain": round(flat_s / two_s, 2),
    }
