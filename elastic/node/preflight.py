"""The quick checks of a node, before its workers get a place: on a thread, while they start."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.doctor.finding import Finding
from elastic.doctor.machine import machine_with
from elastic.doctor.run import run_checks


def start_preflight(tell: Callable[[list[Finding]], None]) -> None:
    """Looks at this node once. `tell` is called with all that was found, by a thread."""

    def run() -> None:
        machine, _ = machine_with(())
        tell(run_checks(machine))

    threading.Thread(target=run, name="preflight", daemon=True).start()
