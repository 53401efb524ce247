"""`elastic logs`: what all workers of a run have written, each line with its slot before it.

Ray keeps a worker's output on its node, also when the worker has ended, until the node's files are
removed. The run's records say who was where.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.cli.arguments import count
from elastic.cli.live import add_run_to, join, paths_of
from elastic.protocol.events import Event, ReplicaForming, WorkerJoined
from elastic.reporting.event_log import read_events
from health.log_tail import read_last
from health.signatures import find_sign
from trainer.errors import ConfigError

_RAYS = re.compile(r"/logs/worker-[0-9a-f]+-[0-9a-f]+-\d+\.(?:out|err)$")
"""The files that Ray has for workers. Nothing else is read, whatever the records say."""

_NODE_S = 60.0
"""How long a node may take."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a worker's output lies."""

    worker: str
    """Its name."""
    slot: str
    """Replica and rank that it had last; "spare": none."""
    node: str
    """Ray's id of its node."""
    files: tuple[str, ...]
    """On that node."""


def add_to(commands: Any) -> None:
    """Adds the command to the parsers of `commands`."""
    verb = commands.add_parser(
        "logs",
        help="what all workers of a run have written, with their slots",
        description="Shows the output of a run's workers, slot by slot, of those that have ended, "
        "too, from the nodes of the Ray cluster. Of nodes that are gone nothing is left.",
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
    """`logs`. Returns 1 where a node that lives did not answer."""
    paths = paths_of(options)
    outputs = find_outputs(read_events(paths.events))
    if options.worker is not None:
        outputs = [one for one in outputs if one.worker == options.worker]
    if not outputs:
        raise ConfigError(
            "RUN", options.run, f"{paths.events} names no such worker", "Name a run's directory"
        )
    join(options.address)
    texts, failed = _fetch(outputs, options.kib << 10)
    for one in outputs:
        for line in _lines(one, texts.get(one.node, {})):
            if not options.faults or find_sign(line, "worker", one.node, 0.0, {}) is not None:
                print(f"{one.slot} {one.worker} | {line}")
    for node in dict.fromkeys(one.node for one in outputs if one.node not in texts):
        print(f"elastic: node {node[:6]}: {failed.get(node, 'it is gone')}", file=sys.stderr)
    return 1 if failed else 0


def find_outputs(events: Iterable[Event]) -> list[Output]:
    """Where the output of a run's workers lies, in the order of their slots, spares last."""
    joined: dict[str, WorkerJoined] = {}
    slots: dict[str, tuple[int, int]] = {}
    for event in events:
        if isinstance(event, WorkerJoined):
            joined[event.worker] = event
        elif isinstance(event, ReplicaForming):
            slots |= {w: (event.replica, rank) for rank, w in enumerate(event.workers)}
    last = len(joined), 0
    return [
        Output(
            worker=worker,
            slot="r{}.{}".format(*slots[worker]) if worker in slots else "spare",
            node=event.node,
            files=tuple(name for name in event.logs if _RAYS.search(name)),
        )
        for worker, event in sorted(joined.items(), key=lambda one: slots.get(one[0], last))
    ]


def read_files(names: Sequence[str], most_bytes: int) -> dict[str, str]:
    """The end of each file, with its name. Runs on the node."""
    return {name: read_last(Path(name), most_bytes) for name in names if _RAYS.search(name)}


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
