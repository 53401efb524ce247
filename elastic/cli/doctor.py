"""`elastic doctor`: what is wrong with this machine."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.cli.show import table
from elastic.doctor.finding import SEVERITIES, Finding
from elastic.doctor.machine import Machine, this_machine
from elastic.doctor.run import run_checks
from trainer.backend.efa_settings import LEFT_ALONE, EfaPlan, plan_efa

_EPILOG = """\
severity:
{severities}

exit status: 0 where nothing is to be done, 1 where something is

Run it on each machine, in the environment that `ray start` has there: with its LD_LIBRARY_PATH and
limits, and in the same container.
"""


def add_to(commands: Any) -> None:
    """Adds the command to the parsers of `commands`."""
    meanings = "\n".join(f"  {name:<8} {meaning}" for name, meaning in SEVERITIES.items())
    verb = commands.add_parser(
        "doctor",
        help="what is wrong with this machine: GPUs, EFA, versions, limits",
        description="Looks at this machine for at most 30 s, beside a run if there is one. Sends "
        "nothing, and changes nothing.",
        epilog=_EPILOG.format(severities=meanings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--json", action="store_true", help="a JSON list, for scripts")
    verb.add_argument(
        "--explain",
        action="store_true",
        help="also the environment that a worker on a GPU sets for EFA here, and why",
    )
    verb.add_argument(
        "--storage",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="a directory that runs write to (more than once for several); look for room there",
    )
    verb.set_defaults(action=run)


def run(options: argparse.Namespace) -> int:
    """`doctor`"""
    folders = (Path(tempfile.gettempdir()), *options.storage)
    return examine(this_machine(os.environ, folders), as_json=options.json, explain=options.explain)


def examine(machine: Machine, *, as_json: bool, explain: bool) -> int:
    """Runs the checks and prints what they say; returns the exit status."""
    findings = run_checks(machine)
    plan = plan_efa(machine.facts, machine.environment)
    if as_json:
        print(_in_json(findings, plan if explain else None))
    else:
        print("\n".join([table(_rows(findings)), *(_explain(machine, plan) if explain else ())]))
    return int(any(found.severity != "OK" for found in findings))


def _rows(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    head = ("check", "severity", "result", "meaning", "fix")
    cells = (
        (one.check, one.severity, one.result, one.meaning or "-", one.fix or "-")
        for one in findings
    )
    return [head, *cells]


def _explain(machine: Machine, plan: EfaPlan) -> Iterator[str]:
    yield f"\nenvironment for {machine.facts.instance or 'this machine'}:"
    if not plan.settings:
        yield "  nothing: no type with EFA that we know, or no EFA devices"
    for one in plan.settings:
        yours = "" if one.yours is None else f", yours stays: {one.yours}"
        yield f"  {one.name}={one.value}{yours}\n    {one.reason} ({one.source})"
    for harm in plan.harms:
        yield f"  harm: {harm}"
    yield "\nleft to the libraries, although guides name them:"
    yield from (f"  {name}\n    {reason}" for name, reason in LEFT_ALONE.items())


def _in_json(findings: Sequence[Finding], plan: EfaPlan | None) -> str:
    checks = [one.to_json() for one in findings]
    if plan is None:
        return json.dumps(checks)
    fields: list[Mapping[str, Any]] = [vars(one) for one in plan.settings]
    return json.dumps({"checks": checks, "environment": fields})
