"""The checks of a node before its workers get a place.

quick   `start_preflight`: on a thread, while the workers start
full    `check_under_load`: before the first of them gets a place; it may take minutes
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from elastic.doctor import load_checks, run
from elastic.doctor.finding import Finding
from elastic.doctor.machine import Machine, machine_with
from elastic.doctor.preflight import decide_isolated
from elastic.doctor.run import Check, failed, run_checks, try_check

LOADS: Mapping[str, Check] = {
    name: load_checks.LOAD_CHECKS[name]
    for name in ("matrix burn", "host to GPU", "all-reduce in the node")
}
"""What loads the node, one after the other. Disks and stores are the run's business anyway."""

LOADED_BOUND_S = run.BOUND_S + len(LOADS) * load_checks.BOUND_S
"""On `check_under_load`."""


def start_preflight(tell: Callable[[list[Finding]], None]) -> None:
    """Looks at this node once. `tell` is called with all that was found, by a thread."""
    threading.Thread(target=lambda: tell(_look()[1]), name="preflight", daemon=True).start()


def _look() -> tuple[Machine | None, list[Finding]]:
    """This node, and what its quick checks say. Workers wait for an answer, so that it cannot be
    looked at is a finding, too."""
    try:
        machine, _ = machine_with(())
        return machine, run_checks(machine)
    except Exception as error:
        return None, [failed("machine", f"{type(error).__name__}: {error}")]


def check_under_load(
    begin: Callable[[str, int, int], None], loads: Mapping[str, Check] = LOADS
) -> list[Finding]:
    """Looks at this node, and then loads it, unless it cannot be looked at, or its first look says
    that nobody may work here.

    Args:
        begin: told of each load before it begins: its name, its number from one on, and of how
            many.
        loads: name -> check.
    """
    machine, found = _look()
    if machine is None or decide_isolated(found):
        return found
    for number, (name, check) in enumerate(loads.items(), 1):
        begin(name, number, len(loads))
        found.append(try_check(name, check, machine))
    return found
