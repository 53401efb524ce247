"""A process whose output goes where Ray has its workers write."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

OWN = "worker-0-0-0.err"
"""What this process writes to."""


@contextlib.contextmanager
def writes_beside(log: Path) -> Iterator[None]:
    """In the block this process's standard error goes to a file of Ray's beside `log`, as that of a
    node's agent does."""
    log.parent.mkdir(exist_ok=True)
    kept = os.dup(2)
    with (log.parent / OWN).open("ab") as own:
        os.dup2(own.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
