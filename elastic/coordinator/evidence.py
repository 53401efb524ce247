"""What was found when workers stood still, kept for people to read.

RUN/incidents/003/manifest.json      when, whom it accuses of what, and where all were
RUN/incidents/003/w1-75dc53.txt      what the threads of a worker were doing
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MOST_FOLDERS = 100
"""Of a run; the first ones are kept."""


def keep_evidence(
    incidents: Path, accused: Mapping[str, str], stacks: Mapping[str, str], **facts: Any
) -> None:
    """Writes a folder. A disk that is full costs the folder, not the run. Blocks.

    Args:
        incidents: where folders are.
        accused: worker -> what shows that it is at fault.
        stacks: worker -> what its threads were doing, of the accused and of some who wait.
        facts: whatever else is known, as JSON has it.
    """
    try:
        incidents.mkdir(exist_ok=True)
        number = 1 + max((int(p.name) for p in incidents.iterdir() if p.name.isdigit()), default=0)
        if number > MOST_FOLDERS:
            return
        folder = incidents / f"{number:03}"
        folder.mkdir()
        for worker, text in stacks.items():
            (folder / f"{worker}.txt").write_text(text)
        manifest = {"time": time.time(), "accused": dict(accused), **facts}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        log.warning("what was found is not kept in %s: %s", incidents, error)
