"""File systems on a machine's disks: which of them can be written to.

Linux makes one read-only when its disk fails.
"""

from __future__ import annotations

from pathlib import Path

from health.reading import Reading

PROC = Path("/proc/self/mounts")


def read_mounts(at_s: float, file: Path = PROC) -> list[Reading]:
    """A reading for each mount of a disk, with `read_only` 0 or 1; the last one at each place.

    Args:
        at_s: now, on the monotonic clock.
        file: the kernel's list of mounts, fstab(5).
    """
    found: dict[str, float] = {}
    for line in file.read_text(errors="replace").splitlines():
        device, place, _, options, *_ = line.split(" ")
        if device.startswith("/dev/"):
            found[place] = float("ro" in options.split(","))
    return [
        Reading(kind="mount", of=place, at_s=at_s, values={"read_only": read_only})
        for place, read_only in found.items()
    ]
