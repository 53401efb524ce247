"""Checks of GPUs and their driver. Those that load the GPUs are not here: these are done in a
moment, beside a run."""

from __future__ import annotations

from pathlib import Path

from elastic.doctor.finding import Finding
from elastic.doctor.machine import Machine


def check_gpus(machine: Machine) -> Finding:
    """Whether all GPUs of the machine's type are there."""
    count, kind = count_gpus(machine.root), machine.kind
    result = "none" if count == 0 else f"all {count}"
    if kind is None or count == kind.gpus:
        return Finding(check="GPUs", result=result)
    result = f"{count} of {kind.gpus}"
    if machine.facts.gpu_driver is None:
        return Finding(
            check="GPUs",
            result=f"{result}, no driver is loaded",
            severity="REBOOT",
            meaning="no worker on a GPU starts here",
            fix="modprobe nvidia, else reboot; in a container, start it with the NVIDIA runtime",
        )
    return Finding(
        check="GPUs",
        result=result,
        severity="ISOLATE",
        meaning="GPUs are lost, or this container was not given them",
        fix=f"Replace the machine; in a container, ask for nvidia.com/gpu: {kind.gpus}",
    )


def count_gpus(root: Path) -> int:
    """By NVML where there is one, which misses those that have fallen off the bus; else those that
    the driver has found at its start."""
    try:
        import pynvml
    except ImportError:
        pynvml = None
    if pynvml is None or root != Path("/"):
        return sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
