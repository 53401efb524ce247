"""`elastic doctor`: what is wrong with this machine, or with those of a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic.cli.show import table_lines
from elastic.doctor.finding import EXIT_STATUS, SEVERITIES, Finding, worst_severity
from elastic.doctor.machine import Machine, machine_with
from elastic.doctor.run import run_checks, run_full
from trainer.backend import nccl_settings
from trainer.backend.determinism import SETTINGS
from trainer.backend.efa_settings import LEFT_ALONE, EfaPlan, plan_efa

_EPILOG = """\
severity:
{severities}

exit status, by the worst of them:
{statuses}

Run it on each machine, in the environment that `ray start` has there: with its LD_LIBRARY_PATH and
limits, and in the same container. --cluster does that by itself.
"""


def add_to(commands: Any) -> None:
    """Adds the command to the parsers of `commands`."""
    meanings = "\n".join(f"  {name:<8} {meaning}" for name, meaning in SEVERITIES.items())
    statuses = "  " + ", ".join(f"{status} {name}" for name, status in EXIT_STATUS.items())
    verb = commands.add_parser(
        "doctor",
        help="what is wrong with this machine: GPUs, EFA, versions, limits",
        description="Looks at this machine for at most 30 s, beside a run if there is one. Sends "
        "nothing, and changes nothing. With --full it also loads the machine, for a few minutes at "
        "most where nothing hangs.",
        epilog=_EPILOG.format(severities=meanings, statuses=statuses),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "--json", action="store_true", help="a JSON list, for scripts; with --explain an object"
    )
    either = verb.add_mutually_exclusive_group()
    either.add_argument(
        "--explain",
        action="store_true",
        help="also the environment that a worker on a GPU sets for EFA here, and why; not with "
        "--cluster",
    )
    verb.add_argument(
        "--full",
        action="store_true",
        help="also load it: a matrix burn, memory, the group of its GPUs, disks, stores; not "
        "beside a run",
    )
    verb.add_argument(
        "--storage",
        action="append",
        default=[],
        metavar="DIR|URL",
        help="a directory that runs write to, where to look for room, or the URL of a store, which "
        "--full tries (more than once for several)",
    )
    either.add_argument(
        "--cluster",
        action="store_true",
        help="all nodes of the Ray cluster with CPUs or GPUs, and pairs of them; not beside a run",
    )
    verb.add_argument(
        "--address", help="of that cluster (default: RAY_ADDRESS, else the one on this machine)"
    )
    verb.set_defaults(action=run)


def run(options: argparse.Namespace) -> int:
    """`doctor`"""
    if options.cluster:
        return show(_examine_cluster(options), as_json=options.json)
    machine, stores = machine_with(options.storage)
    findings = run_full(machine, stores) if options.full else run_checks(machine)
    return show(findings, as_json=options.json, explained=machine if options.explain else None)


def _examine_cluster(options: argparse.Namespace) -> list[Finding]:
    from elastic.cli.live import join  # seconds of imports

    join(options.address)
    from elastic.driver.examine_cluster import examine_cluster

    return examine_cluster(full=options.full, storage=options.storage)


def show(findings: Sequence[Finding], *, as_json: bool, explained: Machine | None = None) -> int:
    """Prints what was found, and the environment of a machine; returns the exit status."""
    plan = None if explained is None else plan_efa(explained.facts, explained.environment)
    if as_json:
        print(_in_json(findings, plan))
    else:
        print("\n".join(_in_words(findings)))
        if explained is not None and plan is not None:
            print("\n".join(_explain(explained, plan)))
    return EXIT_STATUS[worst_severity(one.severity for one in findings)]


def _in_words(findings: Sequence[Finding]) -> Iterator[str]:
    """A row for each, and below it what comes of it and what to do, which are whole sentences."""
    with_nodes = any(one.node for one in findings)
    rows = [("node", "check", "severity", "result")]
    rows += [(one.node or "-", one.check, one.severity, one.result) for one in findings]
    head, *lines = table_lines(rows if with_nodes else [row[1:] for row in rows])
    yield head
    for one, line in zip(findings, lines, strict=True):
        yield line
        if one.meaning:
            yield f"  {one.meaning}"
        if one.fix:
            yield f"  fix: {one.fix}"


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
    yield "\nset on any machine for train.determinism='strict', the default:"
    for setting in SETTINGS:
        if setting.is_variable:
            yield f"  {setting.name}={setting.strict}\n    {setting.reason} ({setting.source})"
    yield "\nset on any machine, so that a run outlives a collective that fails:"
    yield from (f"  {name}={value}" for name, value in nccl_settings.NEEDED.items())
    yield from (f"  {name}={least} or more" for name, least in nccl_settings.AT_LEAST.items())


def _in_json(findings: Sequence[Finding], plan: EfaPlan | None) -> str:
    checks = [one.to_json() for one in findings]
    if plan is None:
        return json.dumps(checks)
    fields: list[Mapping[str, Any]] = [vars(one) for one in plan.settings]
    return json.dumps({"checks": checks, "environment": fields})
