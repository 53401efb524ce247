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

from health.mounts import PROC
from health.reading import Reading

log = logging.getLogger(__name__)

EVERY_S = 30.0
"""Between two questions to a mount."""

_NETWORK = frozenset({"nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "gpfs", "beegfs", "9p"})
_FUSE = "fuse."
"""File systems in processes: of those of a network, most."""


def network_mounts(file: Path = PROC) -> list[str]:
    """Where network file systems are mounted.

    Args:
        file: the kernel's list of mounts, fstab(5).
    """
    lines = (line.split(" ") for line in file.read_text(errors="replace").splitlines())
    found = {place: kind for _, place, kind, *_ in lines}
    return [place for place, kind in found.items() if kind in _NETWORK or kind.startswith(_FUSE)]


def ask(mount: str) -> None:
    """Waits until a file system has answered a statfs(2), which an NFS client asks its server."""
    command = ["stat", "--file-system", "--format=", "--", mount]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


@dataclass(kw_only=True)
class _Question:
    asked_s: float
    answered_s: float | None = None


class StorageWatch:
    """Asks the mounts of this machine. No method waits.

    Args:
        mounts: where they are.
        ask: waits for the answer of one.
    """

    def __init__(
        self,
        mounts: Callable[[], list[str]] = network_mounts,
        ask: Callable[[str], None] = ask,
    ) -> None:
        self._mounts, self._ask = mounts, ask
        self._latest: dict[str, _Question] = {}

    def look(self, now_s: float) -> list[Reading]:
        """A reading of each mount, with `answer_s`, how long its latest answer took or has been
        waited for, and `answered` 0 or 1. Asks those whose turn it is.

        Args:
            now_s: now, on the monotonic clock.
        """
        mounts = self._mounts()
        self._latest = {mount: q for mount, q in self._latest.items() if mount in mounts}
        readings = [
            self._reading(mount, question, now_s) for mount, question in self._latest.items()
        ]
        for mount in mounts:
            latest = self._latest.get(mount)
            answered = latest is None or latest.answered_s is not None
            if answered and (latest is None or now_s - latest.asked_s >= EVERY_S):
                question = _Question(asked_s=now_s)
                work = threading.Thread(target=self._wait, args=(mount, question), daemon=True)
                work.start()
                self._latest[mount] = question  # not before somebody waits for the answer
        return readings

    def _wait(self, mount: str, question: _Question) -> None:
        began_s = time.monotonic()
        try:
            self._ask(mount)
        except OSError as error:  # no process could be started, which says nothing of the mount
            log.warning("%s is not asked whether it answers: %s", mount, error)
        finally:
            question.answered_s = time.monotonic() - began_s

    def _reading(self, mount: str, question: _Question, now_s: float) -> Reading:
        answered_s = question.answered_s
        values = {
            "answer_s": now_s - question.asked_s if answered_s is None else answered_s,
            "answered": float(answered_s is not None),
        }
        return Reading(kind="storage", of=mount, at_s=now_s, values=values)
