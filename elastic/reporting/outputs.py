"""What a run's workers have written: where it lies, and what is kept of it.

Ray keeps a worker's output on its node, also when the worker has ended, until the node's files are
removed. The run's records say who was where. Of nodes whose machines were replaced, or were to go,
the ends of the files lie in the run directory, in `logs/NODE`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.whole_file import write_whole
from elastic.protocol.events import Event, ReplicaForming, WorkerJoined
from health.log_tail import read_last
from health.process import output_folders
from health.signatures import find_sign

_RAYS = re.compile(r"/logs/worker-[0-9a-f]+-[0-9a-f]+-\d+\.(?:out|err)$")
"""The files that Ray has for workers. Nothing else is read, whatever the records say (see
`read_files`)."""

KINDS = WorkerJoined, ReplicaForming
"""Of events, that `find_outputs` looks at."""

MOST_NODES = 100
"""Of a run, of which something is kept; the last ones."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a worker's output lies."""

    worker: str
    """Its name."""
    slot: str
    """Replica and rank that it had last; "spare": none."""
    node: str
    """Ray's id of its node."""
    files: tuple[str, ...]
    """On that node."""


def find_outputs(events: Iterable[Event]) -> list[Output]:
    """Where the output of a run's workers lies, in the order of their slots, spares last. `events`:
    all of the run, or those of `KINDS`."""
    joined: dict[str, WorkerJoined] = {}
    slots: dict[str, tuple[int, int]] = {}
    for event in events:
        if isinstance(event, WorkerJoined):
            joined[event.worker] = event
        elif isinstance(event, ReplicaForming):
            slots |= {w: (event.replica, rank) for rank, w in enumerate(event.workers)}
    last = len(joined), 0
    return [
        Output(
            worker=worker,
            slot="r{}.{}".format(*slots[worker]) if worker in slots else "spare",
            node=event.node,
            files=tuple(name for name in event.logs if _RAYS.search(name)),
        )
        for worker, event in sorted(joined.items(), key=lambda one: slots.get(one[0], last))
    ]


def read_files(names: Sequence[str], most_bytes: int, faults: bool = False) -> dict[str, str]:
    """The end of each file that Ray has of a worker of this node, with its name: it lies where Ray
    keeps the output of this process. Runs on the node. The names are the records', which whoever
    writes to the run directory may have made up.

    Args:
        names: of the files.
        most_bytes: of each.
        faults: leave only the lines that speak of faults we know.
    """
    folders = output_folders()
    rays = (n for n in names if _RAYS.search(n) and os.path.dirname(n) in folders)
    texts = {name: read_last(Path(name), most_bytes) for name in rays}
    return {name: _faults_in(text) for name, text in texts.items()} if faults else texts


def keep_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Keeps what `read_files` has found on a node in `folder`, and lets go of the oldest of its
    siblings where there are too many. What could not be read, or is empty, replaces nothing that
    was kept before.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if text:
            write_whole(folder / Path(name).name, text)
    for old in sorted(folder.parent.iterdir(), key=_written)[:-MOST_NODES]:
        shutil.rmtree(old, ignore_errors=True)


def read_kept(
    folder: Path, names: Sequence[str], most_bytes: int, faults: bool = False
) -> dict[str, str]:
    """As `read_files`, of what is kept of a node in `folder`."""
    texts = {name: read_last(folder / Path(name).name, most_bytes) for name in names}
    return {name: _faults_in(text) for name, text in texts.items()} if faults else texts


def _faults_in(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(line for line in lines if find_sign(line, "worker", "", 0.0, {}) is not None)


def _written(path: Path) -> float:
    return path.stat().st_mtime
