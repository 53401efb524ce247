"""The checks of a node before its workers get a place.

quick   `start_preflight`: on a thread, while the workers start
full    `check_under_load`: before the first of them gets a place; it may take minutes
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from elastic.doctor import load_checks, run
from elastic.doctor.finding import Finding
from elastic.doctor.machine import machine_with
from elastic.doctor.preflight import decide_isolated
from elastic.doctor.run import Check, run_checks, try_check

LOADS: Mapping[str, Check] = {
    name: load_checks.LOAD_CHECKS[name]
    for name in ("matrix burn", "host to GPU", "all-reduce in the node")
}
"""What loads the node, one after the other. Disks and stores are the run's business anyway."""

LOADED_BOUND_S = run.BOUND_S + len(LOADS) * load_checks.BOUND_S
"""On `check_under_load`."""


def start_preflight(tell: Callable[[list[Finding]], None]) -> None:
    """Looks at this node once. `tell` is called with all that was found, by a thread."""

    def look() -> None:
        machine, _ = machine_with(())
        tell(run_checks(machine))

    threading.Thread(target=look, name="preflight", daemon=True).start()


def check_under_load(
    begin: Callable[[str, int, int], None], loads: Mapping[str, Check] = LOADS
) -> list[Finding]:
    """Looks at this node, and then loads it, unless its first look says that nobody may work here.

    Args:
        begin: told of each load before it begins: its name, its number from one on, and of how
            many.
        loads: name -> check.
    """
    machine, _ = machine_with(())
    found = run_checks(machine)
    if decide_isolated(found):
        return found
    for number, (name, check) in enumerate(loads.items(), 1):
        begin(name, number, len(loads))
        found.append(try_check(name, check, machine))
    return found
