"""`elastic clear`: the memory of the nodes, for other runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from elastic.cli.live import add_run_to, begun, join
from elastic.protocol.run_paths import hold_run
from trainer.errors import ConfigError


def add_to(commands: Any) -> None:
    """Adds the command to the parsers of `commands`."""
    verb = commands.add_parser(
        "clear",
        help="delete the snapshots of a run that has failed from the nodes' memory",
        description="Deletes a run's snapshots from the memory of all nodes of the Ray cluster, "
        "where they wait for its next start. That start then goes on from the newest checkpoint.",
    )
    add_run_to(verb)
    verb.set_defaults(action=clear_run)


def clear_run(options: argparse.Namespace) -> int:
    """`clear`. Returns 1 where a node that lives did not answer, or may not delete them."""
    paths = begun(options)
    join(options.address)
    from elastic.driver.running import find_run
    from elastic.node.snapshot_survey import clear_snapshots
    from elastic.ray_compat.cluster import live_nodes, named_actors

    # A coordinator and workers go on for a while without the supervisor.
    if find_run(paths, looks_only=True) is not None or named_actors(f"{paths.key}/"):
        fact = f"the run in {paths.root} is going on, and may need them"
        raise ConfigError("RUN", options.run, fact, "Use `elastic stop` first, or wait")
    with hold_run(paths):
        nodes = live_nodes()
        cleared = clear_snapshots(paths)
    deleted, none = (list(cleared.values()).count(what) for what in ("deleted", "none"))
    print(
        f"deleted the snapshots of the run in {paths.root} on {deleted} of {len(nodes)} nodes; "
        f"{none} had none"
    )
    if none == len(nodes):
        print("Where some must be there, name the directory as the run's machines see it.")
    held = {node: cleared.get(node) for node in nodes if cleared.get(node) in (None, "left")}
    for node, what in held.items():
        fact = "has not answered, and may hold some" if what is None else "could not delete them"
        print(f"elastic: node {node[:6]} {fact}", file=sys.stderr)
    return 1 if held else 0
