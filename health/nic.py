"""Counters of a machine's network interfaces, as the kernel shows them in sysfs."""

from __future__ import annotations

from pathlib import Path

from health.reading import Reading

SYSFS = Path("/sys/class/net")

COUNTERS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "carrier_down_count")
"""Those that speak of trouble. The last one counts how often the link went down."""


def read_nics(at_s: float, root: Path = SYSFS) -> list[Reading]:
    """A reading for each interface but the loopback.

    Args:
        at_s: now, on the monotonic clock.
        root: where the kernel shows its interfaces.
    """
    return [
        Reading(kind="nic", of=interface.name, at_s=at_s, values=_counters(interface))
        for interface in sorted(root.glob("*"))
        if interface.name != "lo" and interface.is_dir()
    ]


def _counters(interface: Path) -> dict[str, float]:
    values = {}
    for name in COUNTERS:
        folder = interface if name == "carrier_down_count" else interface / "statistics"
        try:
            values[name] = float((folder / name).read_text())
        except (OSError, ValueError):  # it went, or has no such counter, or that is no number
            continue
    return values
