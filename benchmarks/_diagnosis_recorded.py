"""Cases of logs, exceptions and instruments: `diagnosis_cases.json` says what was written and read
where, and who was lost. From there on they go the way of a node's agent and the coordinator; what
workers have written is in a file, of which the end is read.

Lines come from the source that a case names. What stands round them, such as who was lost, is ours
in all cases; `invented` says that the lines or numbers are, too.

`diagnosis_published.json` has lines that others have published, and what they found out. They were
gathered after the rules, and judged before any rule was changed for them (docs/health.md has what
came of it). Names of machines, addresses and some numbers in them are changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from benchmarks._diagnosis_faults import NAMES, NODE_OF, NODES, TIME, WORKERS, Case, Expected, lost
from benchmarks._diagnosis_faults import run_events as events_of
from elastic.node.health_watch import hear_worker
from elastic.protocol import events
from elastic.protocol.causes import Cause
from health.judgement import judge
from health.log_tail import LogTail
from health.reading import Kind, Reading
from health.signatures import find_sign
from health.standing import Standing
from health.verdict import Sign

_HERE = Path(__file__).parent

_APART_S = 5.0
"""Between two readings."""


def recorded_cases() -> list[Case]:
    """All that rules were made with."""
    return _cases(_HERE / "diagnosis_cases.json")


def published_cases() -> list[Case]:
    """All that came after the rules."""
    return _cases(_HERE / "diagnosis_published.json")


def _cases(file: Path) -> list[Case]:
    return [_case(entry) for entry in json.loads(file.read_text(encoding="utf-8"))]


def _case(entry: Mapping[str, Any]) -> Case:
    names = {**NAMES, **entry.get("names", {})}
    happened: list[events.Event] = [
        lost(worker, Cause(cause), detail) for worker, cause, detail in entry.get("losses", ())
    ]
    for node in NODES:
        signs = _signs(entry, node)
        if signs or "names" in entry:
            happened.append(
                events.SignsChanged(
                    time=TIME - 2,
                    node=node,
                    names=[names[node]],
                    signs=[sign.to_json() for sign in signs],
                )
            )
    expected = entry["expected"]
    workers, nodes = frozenset(expected["workers"]), frozenset(expected["nodes"])
    return Case(
        name=entry["name"],
        events=events_of(happened),
        expected=Expected(
            cause=expected["cause"],
            workers=workers,
            nodes=nodes,
            remedy=expected.get("remedy"),
            spared=frozenset(WORKERS) - workers,
        ),
        origin="invented" if entry["invented"] else "recorded",
    )


def _signs(entry: Mapping[str, Any], node: str) -> Sequence[Sign]:
    """What stands on a node, as its agent finds it."""
    pids = {int(pid): worker for pid, worker in entry.get("pids", {}).items()}
    lines = [line for where, line in entry.get("kernel", ()) if where == node]
    found = (find_sign(line, "kernel", node, TIME - 2, pids) for line in lines)
    histories = _histories(entry.get("readings", {}).get(node, ()))
    standing = Standing()
    standing.take(judge(histories, node, TIME - 2), now_s=1.0)
    standing.take([sign for sign in found if sign is not None], now_s=1.0)
    standing.take(_heard(entry, node), now_s=1.0)
    return standing.signs


def _heard(entry: Mapping[str, Any], node: str) -> Iterator[Sign]:
    """Signs in what the workers of a node have written."""
    for worker in (worker for worker in WORKERS if NODE_OF[worker] == node):
        lines = [line for writer, line in entry.get("output", ()) if writer == worker]
        with NamedTemporaryFile("w", encoding="utf-8") as file:
            tail = LogTail(Path(file.name))
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            yield from hear_worker(worker, tail, node, TIME - 2)


def _histories(
    things: Sequence[Mapping[str, Any]],
) -> dict[tuple[Kind, str], Sequence[Reading]]:
    return {
        (thing["kind"], thing["of"]): [
            Reading(kind=thing["kind"], of=thing["of"], at_s=_APART_S * index, values=values)
            for index, values in enumerate(thing["series"])
        ]
        for thing in things
    }
