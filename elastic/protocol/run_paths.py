"""The run directory: one object owns all its paths."""

from __future__ import annotations

import fcntl
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from checkpointing import StorePlace, memory_folder
from elastic.errors import RunGoesOnError


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Where a run keeps what."""

    root: Path
    """`storage_path/name`; checkpoints lie in `checkpoints`, the rest beside it."""
    store: StorePlace | None = None
    """Where checkpoints lie instead, if they do."""

    @property
    def checkpoints(self) -> Path | StorePlace:
        """The checkpoint store, for `open_store`."""
        return self.root / "checkpoints" if self.store is None else self.store

    @property
    def key(self) -> str:
        """Tells the run from all others on a cluster."""
        return f"{self.root.name}-{hashlib.sha256(bytes(self.root)).hexdigest()[:12]}"

    def prefix_of(self, attempt: int) -> str:
        """What the names of all that belongs to one start of the run on a cluster begin with (see
        `Job.attempt`)."""
        return f"{self.key}/{attempt:08x}/"

    @property
    def identity(self) -> Path:
        """The run's id (`run_identity.py`)."""
        return self.root / "run.json"

    @property
    def starting(self) -> Path:
        """When the newest start was asked for: the `time` of its `RunStarted`, which its
        coordinator writes down some seconds later."""
        return self.root / "starting"

    @property
    def lock(self) -> Path:
        """Locked by the driver of the run; beside the directory, which may be moved."""
        return self.root.with_name(f".{self.root.name}.lock")

    @property
    def events(self) -> Path:
        """What happened, a JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def steps(self) -> Path:
        """The committed steps, a JSON object a line."""
        return self.root / "steps.jsonl"

    @property
    def pulse(self) -> Path:
        """That the run lives, and how it stands (`pulse.py`)."""
        return self.root / "pulse.json"

    @property
    def incidents(self) -> Path:
        """What was found when something stood still, or was lost: a folder an incident."""
        return self.root / "incidents"

    def output_of(self, node: str) -> Path:
        """What workers wrote on a node whose machine was replaced, or was to go."""
        return self.root / "logs" / Path(node).name

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's log directory."""
        return self.root / "tensorboard"

    def nccl_log(self, worker: str) -> Path:
        """What NCCL said in a worker, on machines with EFA."""
        return self.root / "nccl" / f"{worker}.log"

    @property
    def profile(self) -> Path:
        """Traces of profiled steps."""
        return self.root / "profile"

    @property
    def memory(self) -> Path:
        """The run's snapshots in the memory of whichever node this is asked on."""
        return memory_folder(self.root)

    def set_aside(self) -> Path | None:
        """Moves an earlier run of this name out of the way; nothing of it is lost. Returns where
        to."""
        if not self.root.exists():
            return None
        stamp = time.strftime("%Y%m%d-%H%M%S")
        target = self.root.with_name(f"{self.root.name}.before-{stamp}")
        serial = 1
        while target.exists():
            serial += 1
            target = self.root.with_name(f"{self.root.name}.before-{stamp}-{serial}")
        self.root.rename(target)
        return target


def hold_run(paths: RunPaths) -> IO[bytes]:
    """An open file that holds the run's lock; the system lets go of it when its process ends.

    Raises:
        RunGoesOnError: another process holds it.
    """
    file = paths.lock.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RunGoesOnError(
            "run_config.name",
            paths.root.name,
            f"a run of this name is going on: {paths.lock} is locked",
            "Wait for it, or use another name",
        ) from None
    return file
