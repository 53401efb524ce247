"""Counters of Amazon's network adapter EFA, as its driver shows them in sysfs.

Source: aws/eks-node-monitoring-agent, monitors/networking/efa/efa.go (2026-08-18).
"""

from __future__ import annotations

from pathlib import Path

from health.reading import Reading

SYSFS = Path("/sys/class/infiniband")

_VENDOR, _DEVICE = "0x1d0f", "0xefa"

COUNTERS = (
    "rx_drops",
    "rdma_write_wr_err",
    "rdma_read_wr_err",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
    "retrans_timeout_events",
    "retrans_pkts",
    "retrans_bytes",
)
"""Those that speak of trouble."""


def read_efa(at_s: float, root: Path = SYSFS) -> list[Reading]:
    """A reading for each port of each EFA device; none where there is no such device.

    Args:
        at_s: now, on the monotonic clock.
        root: where the kernel shows its RDMA devices.
    """
    return [
        Reading(kind="efa", of=f"{device.name} port {port.name}", at_s=at_s, values=_counters(port))
        for device in sorted(root.glob("*"))
        if _is_efa(device)
        for port in sorted((device / "ports").glob("*"))
    ]


def _is_efa(device: Path) -> bool:
    try:
        vendor = (device / "device/vendor").read_text().strip()
        return vendor == _VENDOR and (device / "device/device").read_text().startswith(_DEVICE)
    except OSError:
        return False


def _counters(port: Path) -> dict[str, float]:
    values = {}
    for name in COUNTERS:
        try:
            values[name] = float((port / "hw_counters" / name).read_text())
        except (OSError, ValueError):  # no such counter, no answer, or no number
            continue
    return values
