"""Whether network file systems answer: each is asked now and then by a process of its own.

A mount that hangs holds whoever asks it, in the kernel, where no signal may end it. So nobody of
ours asks: a process does, a thread waits for it, and while it hangs no other is started for that
mount. Source of the time that is too long, 15 s: nvidia-resiliency-ext's storage checks.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from health.mounts import PROC, list_mounts
from health.reading import Reading

log = logging.getLogger(__name__)

EVERY_S = 30.0
"""Between two questions to a mount."""

_NETWORK = frozenset(
    {"nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "gpfs", "beegfs", "wekafs", "9p", "virtiofs"}
    | {"fuse"}  # in processes: of those of a network, most
)
"""Kinds, without what "fuse.sshfs" has after its dot."""


def network_mounts(file: Path = PROC) -> list[str]:
    """Where network file systems are mounted.

    Args:
        file: the kernel's list of mounts, fstab(5).
    """
    found = {mount.place: mount.kind for mount in list_mounts(file)}
    return [place for place, kind in found.items() if kind.split(".")[0] in _NETWORK]


def ask(mount: str) -> bool:
    """Waits until a file system has answered a statfs(2), which an NFS client asks its server.
    Returns whether that was without an error.

    Not by Python: where the interpreter lies on a mount that hangs, to start it hangs as well.

    Raises:
        OSError: it could not be asked, or the process was killed: that is no answer of the mount's.
    """
    command = ["stat", "--file-system", "--format=", "--", mount]
    silent = subprocess.DEVNULL
    status = subprocess.run(command, stdout=silent, stderr=silent, check=False).returncode
    if status < 0:
        raise OSError(f"stat was killed by signal {-status}")
    return status == 0


@dataclass(kw_only=True)
class _Question:
    asked_s: float
    answered_s: float | None = None
    failed: bool = False
    """The answer is an error."""
    worked: bool = False
    """It, or one to this mount before it, was answered without an error."""
    not_put: OSError | None = None
    """Why it has no answer, which says nothing of the mount."""


class StorageWatch:
    """Asks the mounts of this machine. No method waits.

    Args:
        mounts: where they are.
        ask: waits for the answer of one, and returns whether it is without an error. It raises
            OSError where it cannot ask.
    """

    def __init__(
        self,
        mounts: Callable[[], list[str]] = network_mounts,
        ask: Callable[[str], bool] = ask,
    ) -> None:
        self._mounts, self._ask = mounts, ask
        self._latest: dict[str, _Question] = {}
        self._told: set[str] = set()
        """Why questions could not be put: each reason once, for all mounts."""

    def look(self, now_s: float) -> list[Reading]:
        """A reading of each mount, with `answer_s`, how long its latest answer took or has been
        waited for, `answered` 0 or 1, `failed` 1 where the answer is an error, and `worked` 1 where
        it, or one before it, was none. None of one that could not be asked. Asks those whose turn
        it is.

        Args:
            now_s: now, on the monotonic clock.
        """
        mounts = self._mounts()
        self._latest = {mount: q for mount, q in self._latest.items() if mount in mounts}
        readings = []
        for mount, question in self._latest.items():
            if question.not_put is None:
                readings.append(self._reading(mount, question, now_s))
            elif (why := str(question.not_put)) not in self._told:
                self._told.add(why)
                log.warning("%s is not asked whether it answers: %s", mount, why)
        for mount in mounts:
            latest = self._latest.get(mount)
            answered = latest is None or latest.answered_s is not None
            if answered and (latest is None or now_s - latest.asked_s >= EVERY_S):
                question = _Question(asked_s=now_s, worked=latest is not None and latest.worked)
                work = threading.Thread(target=self._wait, args=(mount, question), daemon=True)
                work.start()
                self._latest[mount] = question  # not before somebody waits for the answer
        return readings

    def _wait(self, mount: str, question: _Question) -> None:
        began_s = time.monotonic()
        try:
            question.failed = not self._ask(mount)
            question.worked |= not question.failed
        except OSError as error:
            question.not_put = error
        finally:
            question.answered_s = time.monotonic() - began_s

    def _reading(self, mount: str, question: _Question, now_s: float) -> Reading:
        answered_s = question.answered_s
        values = {
            "answer_s": now_s - question.asked_s if answered_s is None else answered_s,
            "answered": float(answered_s is not None),
            "failed": float(question.failed),
            "worked": float(question.worked),
        }
        return Reading(kind="storage", of=mount, at_s=now_s, values=values)
