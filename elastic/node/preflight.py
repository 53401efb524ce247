"""The quick checks of a node, before its workers get a place: on a thread, while they start."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from elastic.doctor.finding import Finding
from elastic.doctor.machine import this_machine
from elastic.doctor.run import run_checks


def start_preflight(tell: Callable[[list[Finding]], None]) -> None:
    """Looks at this node once. `tell` is called with all that was found, by a thread."""

    def run() -> None:
        machine = this_machine(os.environ, (Path(tempfile.gettempdir()),))
        tell(run_checks(machine))

    threading.Thread(target=run, name="preflight", daemon=True).start()
