"""File systems on a machine's disks: which of them can be written to.

Linux makes one read-only when its disk fails; people and package managers make others so. What the
run does not write to says nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from health.reading import Reading

PROC = Path("/proc/self/mounts")


def read_mounts(at_s: float, written: Iterable[Path], file: Path = PROC) -> list[Reading]:
    """A reading for each mount of a disk that is written to, with `read_only` 0 or 1; the last one
    at each place.

    Args:
        at_s: now, on the monotonic clock.
        written: absolute paths, without links, that are written to.
        file: the kernel's list of mounts, fstab(5).
    """
    found: dict[Path, tuple[str, float]] = {}
    for line in file.read_text(errors="replace").splitlines():
        device, place, _, options, *_ = line.split(" ")
        found[Path(place)] = device, float("ro" in options.split(","))
    used = {next((at for at in (path, *path.parents) if at in found), None) for path in written}
    return [
        Reading(kind="mount", of=str(place), at_s=at_s, values={"read_only": read_only})
        for place, (device, read_only) in found.items()
        if place in used and device.startswith("/dev/")
    ]
