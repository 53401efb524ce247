"""`elastic nodes`: what the runs of a storage path remember of machines, and what one run found."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpointing.named_directory import named_directory
from elastic.cli.live import begun
from elastic.cli.show import human_time, table
from elastic.protocol.run_paths import RunPaths
from elastic.reporting import health_events, incidents, verdicts
from elastic.reporting.event_log import read_events, steps_before
from elastic.reporting.suspect_file import SuspectFile
from health.suspects import Mark, is_suspect, score
from trainer.errors import ConfigError


def add_to(commands: Any) -> None:
    """Adds `nodes` to the parsers of `commands`."""
    nodes = commands.add_parser(
        "nodes",
        help="suspect machines",
        description="What the runs of a storage path remember of machines that failed them.",
    )
    verbs = nodes.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = verbs.add_parser("list", help="all machines with something against them")
    clear = verbs.add_parser("clear", help="forget a machine, such as one that was mended")
    for verb, action in ((show, list_nodes), (clear, clear_nodes)):
        verb.add_argument("storage", metavar="STORAGE", type=Path, help="the runs' storage_path")
        verb.set_defaults(action=action)
    export = verbs.add_parser(
        "export", help="a run's verdicts against machines, as NVSentinel's health events (JSON)"
    )
    export.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    export.set_defaults(action=export_verdicts)
    show.add_argument("--json", action="store_true", help="as a JSON object")
    clear.add_argument("machine", metavar="MACHINE", nargs="?", help="as `list` has it; none: all")


def list_nodes(options: argparse.Namespace) -> int:
    """`list`"""
    record, now = _file_of(options.storage).read(), time.time()
    worst_first = sorted(record, key=lambda machine: -score(record[machine], now))
    if options.json:
        print(json.dumps({"machines": [_facts(name, record[name], now) for name in worst_first]}))
        return 0
    head = ("machine", "score", "suspect", "marks", "last", "cause", "run", "evidence")
    print(table([head, *(_row(name, record[name], now) for name in worst_first)]))
    return 0


def _facts(machine: str, marks: Sequence[Mark], now: float) -> dict[str, Any]:
    last = marks[-1]
    return {
        "machine": machine,
        "score": round(score(marks, now), 2),
        "suspect": is_suspect(marks, now),
        "marks": len(marks),
        "last": last.time,
        "cause": last.cause,
        "run": last.run,
        "detail": last.detail,
    }


def _row(machine: str, marks: Sequence[Mark], now: float) -> tuple[str, ...]:
    facts = _facts(machine, marks, now)
    return (
        machine,
        f"{facts['score']:.2f}",
        "suspect" if facts["suspect"] else "-",
        str(facts["marks"]),
        human_time(facts["last"]),
        facts["cause"],
        facts["run"],
        facts["detail"],
    )


def clear_nodes(options: argparse.Namespace) -> int:
    """`clear`"""
    count = _file_of(options.storage).clear(options.machine)
    if options.machine is not None and not count:
        raise ConfigError(
            "MACHINE",
            options.machine,
            f"nothing is remembered of it in {options.storage}",
            "Name one as `elastic nodes list` has it",
        )
    print(f"{count} machine{'' if count == 1 else 's'} forgotten")
    return 0


def _file_of(storage: Path) -> SuspectFile:
    """The record of a storage path.

    Raises:
        ConfigError: it is none: an empty record there would say that all is well.
    """
    if not storage.is_dir():
        raise ConfigError("STORAGE", str(storage), "no such directory", "Name the runs' one")
    if RunPaths(root=storage).events.exists():
        raise ConfigError(
            "STORAGE",
            str(storage),
            "the directory of one run, which has events.jsonl",
            f"Use {named_directory(storage).parent}",
        )
    return SuspectFile(storage)


def export_verdicts(options: argparse.Namespace) -> int:
    """`export`"""
    paths = begun(options)
    kinds = {*incidents.KINDS, *verdicts.KINDS, *health_events.KINDS}
    events = read_events(paths.events, kinds=kinds, lenient=True)
    # Of steps verdicts ask alone how far the run was when something happened.
    steps = steps_before(paths.steps, (event.time for event in events))
    found = verdicts.find_verdicts(events, steps, incidents.find_incidents(events, steps))
    told = health_events.to_health_events(found, events, paths.root.name)
    print(json.dumps(told, indent=1))
    return 0
