"""`elastic logs`: what all workers of a run have written, each line with its slot before it."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from elastic.cli.arguments import count
from elastic.cli.live import add_run_to, begun, join
from elastic.reporting.event_log import read_events
from elastic.reporting.outputs import KINDS, Output, find_outputs, read_files, read_kept
from health.signatures import find_sign
from trainer.errors import ConfigError

_NAMED = 5
"""Workers in a message, of thousands."""
_NODE_S = 60.0
"""How long a node may take."""


def add_to(commands: Any) -> None:
    """Adds the command to the parsers of `commands`."""
    verb = commands.add_parser(
        "logs",
        help="what all workers of a run have written, with their slots",
        description="Shows the output of a run's workers, slot by slot, of those that have ended, "
        "too, from the nodes of the Ray cluster. Of nodes that are gone, or where there is no "
        "cluster, there is what was kept in the run's directory.",
    )
    add_run_to(verb)
    verb.add_argument("--worker", help="of this one alone, such as w3-75dc53")
    verb.add_argument(
        "--kib", type=count, default=64, help="the last so many KiB of each file (default: 64)"
    )
    verb.add_argument(
        "--faults", action="store_true", help="only the lines that speak of faults we know"
    )
    verb.set_defaults(action=show_logs)


def show_logs(options: argparse.Namespace) -> int:
    """`logs`. Returns 1 where a node that lives did not answer; or where none could be asked, and
    a cluster was named, or of some of them nothing is kept."""
    paths = begun(options)
    outputs = find_outputs(read_events(paths.events, kinds=KINDS, lenient=True))
    if not outputs:
        fact = f"no worker of the run in {paths.root} has joined it yet"
        raise ConfigError("RUN", options.run, fact, "Wait until one has")
    if options.worker is not None:
        known = [one.worker for one in outputs]
        outputs = [one for one in outputs if one.worker == options.worker]
        if not outputs:
            fact = f"{paths.events} names no such worker; {_near(options.worker, known)}"
            raise ConfigError("--worker", options.worker, fact, "Use one of these, or leave it out")
    most_bytes = options.kib << 10
    kept = {one.node for one in outputs if paths.output_of(one.node).is_dir()}
    try:
        join(options.address)
    except ConfigError as error:
        if not kept:
            raise
        print(f"elastic: no node can be asked: {error.fact}", file=sys.stderr)
        texts: dict[str, dict[str, str]] = {}
        missing = {one.node: "it was not asked" for one in outputs}
        failed = set(missing) if options.address else missing.keys() - kept
    else:
        texts, silent = _fetch(outputs, most_bytes)
        missing = {one.node: "it is gone" for one in outputs if one.node not in texts} | silent
        failed = set(silent)
    for one in outputs:
        if one.node in missing and one.node in kept:
            found = read_kept(paths.output_of(one.node), one.files, most_bytes)
            texts.setdefault(one.node, {}).update(found)
        for line in _lines(one, texts.get(one.node, {})):
            if not options.faults or find_sign(line, "worker", one.node, 0.0, {}) is not None:
                print(f"{one.slot} {one.worker} | {line}")
    for node, why in missing.items():
        what = "this is what was kept before" if node in kept else "nothing of it is kept"
        print(f"elastic: node {node[:6]}: {why}, and {what}", file=sys.stderr)
    return 1 if failed else 0


def _near(worker: str, known: Sequence[str]) -> str:
    """Which workers there are; of many those whose names are most like `worker`."""
    if len(known) <= _NAMED:
        return f"it names {', '.join(known)}"
    near = get_close_matches(worker, known, _NAMED, cutoff=0.0)
    return f"of the {len(known)} that it names the nearest are {', '.join(near)}"


def _fetch(
    outputs: Sequence[Output], most_bytes: int
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """What is left on each node that answers, by file, and why each other living one does not."""
    from elastic.ray_compat.cluster import Failed, live_nodes, on_nodes

    asked: dict[str, list[str]] = defaultdict(list)
    for one in outputs:
        asked[one.node] += one.files
    alive = set(live_nodes())
    calls = {node: (names, most_bytes) for node, names in asked.items() if node in alive}
    answers = on_nodes(read_files, calls, timeout_s=_NODE_S)
    failed = {node: told.why for node, told in answers.items() if isinstance(told, Failed)}
    return {n: told for n, told in answers.items() if not isinstance(told, Failed)}, failed


def _lines(one: Output, texts: Mapping[str, str]) -> Iterator[str]:
    for name in one.files:
        yield from (line for line in texts.get(name, "").splitlines() if not _is_rays(line))


def _is_rays(line: str) -> bool:
    """Ray marks the output of its jobs and actors."""
    return line.startswith((":job_id:", ":actor_name:", ":task_name:"))
