"""File systems on a machine's disks: which of them can be written to.

Linux makes one read-only when its disk fails; people and package managers make others so. What the
run does not write to says nothing of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from health.reading import Reading

PROC = Path("/proc/self/mounts")

_ESCAPE = re.compile(r"\\([0-7]{3})")
"""A blank, a tab, a newline, a # or a backslash within a field."""


def temporary_folder() -> Path:
    """Where `tempfile` looks first. It would write a file to choose, which a disk that is full or
    read-only refuses: the ones that are looked for."""
    named = map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))
    return Path(next(filter(None, named), "/tmp"))


class Mount(NamedTuple):
    """A file system in its place."""

    device: str
    place: str
    kind: str
    options: list[str]


def list_mounts(file: Path = PROC) -> Iterator[Mount]:
    """All of them, in the order in which they were mounted.

    Args:
        file: the kernel's list of mounts, fstab(5).
    """
    text = file.read_bytes().decode(errors="replace")
    for line in filter(None, text.split("\n")):  # what else ends a line may stand in a place's name
        fields = (_ESCAPE.sub(lambda found: chr(int(found[1], 8)), f) for f in line.split(" "))
        device, place, kind, options, *_ = fields
        yield Mount(device, place, kind, options.split(","))


def read_mounts(at_s: float, written: Iterable[Path], file: Path = PROC) -> list[Reading]:
    """A reading for each mount of a disk that is written to, with `read_only` 0 or 1; the last one
    at each place.

    Args:
        at_s: now, on the monotonic clock.
        written: absolute paths, without links, that are written to.
        file: the kernel's list of mounts, fstab(5).
    """
    found: dict[Path, tuple[str, float]] = {}
    for mount in list_mounts(file):
        found[Path(mount.place)] = mount.device, float("ro" in mount.options)
    used = {next((at for at in (path, *path.parents) if at in found), None) for path in written}
    return [
        Reading(kind="mount", of=str(place), at_s=at_s, values={"read_only": read_only})
        for place, (device, read_only) in found.items()
        if place in used and device.startswith("/dev/")
    ]
