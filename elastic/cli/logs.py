"""`elastic logs`: what all workers of a run have written, each line with its slot before it."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from elastic.cli.arguments import count
from elastic.cli.live import add_run_to, begun, join
from elastic.reporting.event_log import read_events
from elastic.reporting.outputs import KINDS, Output, find_outputs, read_files, read_kept
from trainer.errors import ConfigError

_NAMED = 5
"""Workers in a message, of thousands."""
_NODE_S = 60.0
"""How long a node may take."""

_PORTION_BYTES = 64 << 20
"""Of output, fetched at most before it is printed: at 64 KiB a file, that of 512 workers."""


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
    kept = {one.node for one in outputs if paths.output_of(one.node).is_dir()}
    missing, failed = _join(options, outputs, kept)
    shown: set[str] = set()
    most_bytes = options.kib << 10
    for portion in plan_portions(outputs, most_bytes):
        texts, silent = _fetch(portion, missing.keys(), most_bytes, options.faults)
        missing |= silent
        failed |= silent.keys()
        shown |= texts.keys()
        for one in portion:
            found = texts.get(one.node, {})
            if one.node in missing and one.node in kept:
                folder = paths.output_of(one.node)
                found = read_kept(folder, one.files, most_bytes, options.faults)
            for line in _lines(one, found):
                print(f"{one.slot} {one.worker} | {line}")
        sys.stdout.flush()
    for node in dict.fromkeys(one.node for one in outputs if one.node in missing):
        what = _describe_kept(node in kept, node in shown)
        print(f"elastic: node {node[:6]}: {missing[node]}, and {what}", file=sys.stderr)
    return 1 if failed else 0


def _describe_kept(kept: bool, shown: bool) -> str:
    """What there is of a node that does not answer; some of it was `shown` while it still did."""
    if shown:
        return "the rest is what was kept before" if kept else "nothing of the rest is kept"
    return "this is what was kept before" if kept else "nothing of it is kept"


def _join(
    options: argparse.Namespace, outputs: Sequence[Output], kept: Collection[str]
) -> tuple[dict[str, str], set[str]]:
    """Joins the cluster. Returns the nodes that cannot be asked, with why, and those of them that
    should have been.

    Raises:
        ConfigError: none can be asked, and of none anything is `kept`.
    """
    from elastic.ray_compat.cluster import live_nodes

    try:
        join(options.address)
    except ConfigError as error:
        if not kept:
            raise
        print(f"elastic: no node can be asked: {error.fact}", file=sys.stderr)
        missing = {one.node: "it was not asked" for one in outputs}
        return missing, set(missing) if options.address else missing.keys() - kept
    alive = set(live_nodes())
    return {one.node: "it is gone" for one in outputs if one.node not in alive}, set()


def plan_portions(outputs: Sequence[Output], most_bytes: int) -> Iterator[Sequence[Output]]:
    """Cuts `outputs` into portions that can be held at once, in their order.

    Args:
        outputs: of the workers to show.
        most_bytes: of each file.
    """
    portion: list[Output] = []
    size = 0
    for one in outputs:
        own = most_bytes * len(one.files)
        if portion and size + own > _PORTION_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(one)
        size += own
    if portion:
        yield portion


def _near(worker: str, known: Sequence[str]) -> str:
    """Which workers there are; of many those whose names are most like `worker`."""
    if len(known) <= _NAMED:
        return f"it names {', '.join(known)}"
    near = get_close_matches(worker, known, _NAMED, cutoff=0.0)
    return f"of the {len(known)} that it names the nearest are {', '.join(near)}"


def _fetch(
    portion: Sequence[Output], passed_by: Collection[str], most_bytes: int, faults: bool
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """What is left on each node that answers, by file, and why each other one does not.

    Args:
        portion: what to fetch.
        passed_by: nodes that are not asked.
        most_bytes: of each file.
        faults: only the lines that speak of them.
    """
    asked: dict[str, list[str]] = defaultdict(list)
    for one in portion:
        if one.node not in passed_by:
            asked[one.node] += one.files
    if not asked:
        return {}, {}
    from elastic.ray_compat.cluster import Failed, on_nodes

    # A node with a former version of the package does not know the last one.
    more = (faults,) if faults else ()
    calls = {node: (names, most_bytes, *more) for node, names in asked.items()}
    answers = on_nodes(read_files, calls, timeout_s=_NODE_S)
    failed = {node: told.why for node, told in answers.items() if isinstance(told, Failed)}
    return {n: told for n, told in answers.items() if not isinstance(told, Failed)}, failed


def _lines(one: Output, texts: Mapping[str, str]) -> Iterator[str]:
    for name in one.files:
        yield from (line for line in texts.get(name, "").splitlines() if not _is_rays(line))


def _is_rays(line: str) -> bool:
    """Ray marks the output of its jobs and actors."""
    return line.startswith((":job_id:", ":actor_name:", ":task_name:"))
