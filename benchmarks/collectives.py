"""All-gather and reduce-scatter, flat and in two levels, over network namespaces as nodes; beside
it the forecast for 1,024 GPUs.

Each node has a network interface of a limited rate (tbf) and a latency that a relay in user space
makes (`_slow_network.py`); inside a node workers speak over loopback. Flat is what FSDP2 does over
Gloo: a ring, and for the reduce-scatter an all-reduce, which sends twice as much. The ways take
turns; a time is that of the slowest worker, and medians are over the turns.

Of each number of nodes the links are measured first, the relay without latency and rate, too: that
is its own cost. From these follows what the model says for the same size; the forecast has nothing
measured in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from typing import Any

import torch.multiprocessing as mp

from benchmarks._collectives_model import (
    Fabric,
    forecast,
    gains_by_nodes,
    ring_of_hops_s,
    ring_s,
    two_level_s,
)
from benchmarks._collectives_rank import Settings, work
from benchmarks._common import end_properly, print_result, say, scratch, show_table
from benchmarks._slow_network import SlowNetwork
from tests.support.hosts import ip_of, why_no_hosts

_KINDS = ("all_gather", "reduce_scatter")


def main() -> None:
    """Runs the benchmark; the last line on stdout is one JSON object."""
    options = parse()
    end_properly()
    why_not = "only the forecast was asked for" if options.forecast else why_no_hosts()
    if why_not is None and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        why_not = "the relay needs /dev/net/tun"
    forecast_1024, by_nodes = forecast(1024), gains_by_nodes()
    forecasts = {"forecast_1024": forecast_1024, "forecast_by_nodes": by_nodes}
    for name, kinds in forecast_1024.items():
        show_table(f"forecast for a {name} block on 1,024 GPUs of p4d", kinds)
    show_table("forecast of the gain for a micro-batch, by p4d nodes of a replica", by_nodes)
    if why_not is not None:
        say(f"nothing is measured: {why_not}")
        print_result({"nodes": None, "why_not": why_not, **forecasts})
        return
    nodes = {}
    for count in options.nodes:
        say(f"{count} nodes with {options.here} workers")
        nodes[str(count)] = measure(count, options)
        show_table(f"{count} nodes", {kind: nodes[str(count)][kind] for kind in _KINDS})
    bare = run(2, options, latency_s=0.0, rate=None)
    relay = {
        "alpha_ms": round(1e3 * bare[0]["alpha_s"], 3),
        "mbytes_s": round(bare[0]["node_bytes_s"] / 1e6),
    }
    show_table("the relay by itself", {"relay": relay})
    print_result({"nodes": nodes, "relay": relay, **forecasts})


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument(
        "--forecast", action="store_true", help="the forecast alone: no time at all"
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8], help="(2 4 8)")
    parser.add_argument("--here", type=int, default=2, help="workers on a node (2)")
    parser.add_argument("--kib", type=int, default=1024, help="of a whole buffer (1024)")
    parser.add_argument("--latency-ms", type=float, default=10.0, help="one way (10)")
    parser.add_argument("--rate", default="400mbit", help="of a node (400mbit)")
    parser.add_argument("--turns", type=int, default=9, help="timed turns (9)")
    options = parser.parse_args()
    if min(options.nodes) < 2 or options.here < 2 or options.turns < 3:
        parser.error("use 2 nodes or more, 2 workers or more on each, and 3 turns or more")
    return options


def measure(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Times on so many nodes, and the model's."""
    ranks = run(count, options, latency_s=options.latency_ms / 1e3, rate=options.rate)
    first = ranks[0]
    fabric = Fabric(
        alpha_s=first["alpha_s"],
        inside_alpha_s=first["inside_alpha_s"],
        node_bytes_s=first["node_bytes_s"],
        inside_bytes_s=float("inf"),
    )
    times = {way: _slowest_s(ranks, way) for way in first["times_s"]}
    size = count, options.here, options.kib * 1024.0, fabric
    model = {"ring": ring_s(*size), "hops": ring_of_hops_s(*size), "two": two_level_s(*size)}
    found: dict[str, Any] = {
        kind: _compare(times[f"flat_{kind}"], times[f"two_level_{kind}"], model) for kind in _KINDS
    }
    return {
        "flat_s": round(sum(times[f"flat_{kind}"] for kind in _KINDS), 4),
        "two_level_s": round(sum(times[f"two_level_{kind}"] for kind in _KINDS), 4),
        **found,
        "alpha_ms": round(1e3 * fabric.alpha_s, 2),
        "inside_alpha_ms": round(1e3 * fabric.inside_alpha_s, 2),
        "mbytes_s": round(fabric.node_bytes_s / 1e6, 1),
        "group_s": round(max(rank["group_s"] for rank in ranks), 3),
        "sub_groups_s": round(max(rank["sub_groups_s"] for rank in ranks), 3),
        "relay_cpu_s": round(first["relay_cpu_s"], 2),
    }


def _compare(flat_s: float, two_s: float, model: Mapping[str, float]) -> dict[str, float]:
    return {
        "flat_s": round(flat_s, 4),
        "two_level_s": round(two_s, 4),
        "gain": round(flat_s / two_s, 2),
        "model_flat_s": round(model["ring"], 4),
        "model_two_level_s": round(model["two"], 4),
        "model_gain": round(model["ring"] / model["two"], 2),
        "model_gain_by_hops": round(model["hops"] / model["two"], 2),
    }


def _slowest_s(ranks: list[dict[str, Any]], way: str) -> float:
    turns = zip(*(rank["times_s"][way] for rank in ranks), strict=True)
    return statistics.median(max(turn) for turn in turns)


def run(
    count: int, options: argparse.Namespace, *, latency_s: float, rate: str | None
) -> list[dict[str, Any]]:
    """What the workers found, by rank; the first also has the relay's CPU time."""
    with (
        scratch("collectives") as folder,
        SlowNetwork(count, latency_s=latency_s, rate=rate) as network,
    ):
        settings = Settings(
            namespaces=network.hosts,
            here=options.here,
            host=ip_of(0),
            size_bytes=options.kib * 1024,
            turns=options.turns,
        )
        size = count * options.here
        # Forked, so that torch is imported once.
        mp.start_processes(work, args=(settings, folder), nprocs=size, start_method="fork")
        ranks = [json.loads((folder / str(rank)).read_text()) for rank in range(size)]
        ranks[0]["relay_cpu_s"] = network.relay_cpu_s
    return ranks


if __name__ == "__main__":
    main()
