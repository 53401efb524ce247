"""What was found when workers stood still, or were lost, kept for people to read.

RUN/incidents/003/manifest.json               when, whom it accuses of what, where all were, what
                                              collectives had not ended, and what the files are
RUN/incidents/003/w1-75dc53.txt               what the threads of a worker were doing
RUN/incidents/003/w1-75dc53.log               the last lines of its output
RUN/incidents/003/w1-75dc53.collectives.json  its flight recorder
RUN/incidents/003/readings.json               what the instruments showed last of each
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.protocol.messages import Evidence
from health.flight import find_pending

log = logging.getLogger(__name__)

MOST_FOLDERS = 100
"""Of a run; the first ones are kept."""
LESSER_SHARE = 0.5
"""Of them, for what says less: the last words of workers that are lost otherwise than for standing
still, and standstills without a verdict."""


def keep_evidence(
    incidents: Path,
    accused: Mapping[str, str],
    found: Mapping[str, Evidence],
    *,
    share: float = 1.0,
    **facts: Any,
) -> None:
    """Writes a folder. What goes wrong with it costs the folder, not the run. Blocks.

    Args:
        incidents: where folders are.
        accused: worker -> what shows that it is at fault.
        found: worker -> what was found of it, of the accused and of some who wait.
        share: of `MOST_FOLDERS` that there may be after it.
        facts: whatever else is known, as JSON has it.
    """
    try:
        folder = _make_folder(incidents, int(share * MOST_FOLDERS))
        if folder is None:
            return
        files = {name: text for name, text in _files(found) if text}
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        manifest = {
            "time": time.time(),
            "accused": dict(accused),
            **facts,
            "pending_collectives": {
                w: find_pending(one.collectives) for w, one in found.items() if one.collectives
            },
            "files": {name: _what(name) for name in sorted(files)},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    except Exception:  # a full disk, a recording that is cut off
        log.warning("what was found is not kept in %s", incidents, exc_info=True)


def has_room(incidents: Path, share: float) -> bool:
    """Whether `keep_evidence` would make a folder. Blocks."""
    try:
        return _taken(incidents) < int(share * MOST_FOLDERS)
    except OSError:  # there is none yet
        return True


def _taken(incidents: Path) -> int:
    return max((int(p.name) for p in incidents.iterdir() if p.name.isdigit()), default=0)


def _make_folder(incidents: Path, most: int) -> Path | None:
    """The next one; None where there are enough. Several threads may keep what they have found."""
    incidents.mkdir(exist_ok=True)
    for number in range(_taken(incidents) + 1, most + 1):
        folder = incidents / f"{number:03}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            _warn_of_last(folder, number)
            return folder
    return None


def _warn_of_last(folder: Path, number: int) -> None:
    """Says so where a folder is the last one of its kind: later nothing tells that some is lost."""
    for share, what in (LESSER_SHARE, "last words and slow steps"), (1.0, "what is found"):
        if number == int(share * MOST_FOLDERS):
            log.warning(
                "%s is the last of %d folders for %s: no more is kept, unless the latest ones are "
                "moved away",
                folder,
                number,
                what,
            )


_KINDS = {
    ".txt": "what its threads were doing",
    ".log": "the last lines of its output",
    ".collectives.json": "what its flight recorder says",
    "readings.json": "what the instruments showed last, by worker",
}


def _files(found: Mapping[str, Evidence]) -> Iterator[tuple[str, str]]:
    for worker, one in found.items():
        name = Path(worker).name  # the records may have been written by others: no way out of here
        yield f"{name}.txt", one.stacks
        yield f"{name}.log", one.log
        yield f"{name}.collectives.json", one.collectives
    readings = {w: [asdict(r) for r in one.readings] for w, one in found.items() if one.readings}
    yield "readings.json", json.dumps(readings, indent=1) if readings else ""


def _what(name: str) -> str:
    return next(meaning for ending, meaning in _KINDS.items() if name.endswith(ending))
