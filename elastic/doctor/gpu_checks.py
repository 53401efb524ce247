"""Checks of GPUs and their driver. Those that load the GPUs are not here: these are done in a
moment, beside a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic.doctor.finding import Finding, Severity, worst_severity
from elastic.doctor.machine import Machine
from health.gpu import Gpus, close_nvml, try_nvml
from health.reading import Reading
from health.verdict import Step
from health.xids import recovery_of


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
    the driver has found at its start. Where NVML does not start, those of them that were given."""
    nvml, trouble = try_nvml() if root == Path("/") else (None, "")
    if nvml is None:
        return len(given_gpus(root)) if trouble else _at_driver_start(root)
    try:
        return int(nvml.nvmlDeviceGetCount())
    finally:
        close_nvml(nvml)


_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)

_BY_STEP: dict[Step, Severity] = {
    "other_seat": "RESET",
    "reset_gpu": "RESET",
    "reboot": "REBOOT",
    "replace_node": "ISOLATE",
}
"""What the driver asks for, as a severity."""


def check_gpu_health(machine: Machine) -> Finding:
    """What NVML knows of errors: those that memory could not correct, rows that could not be
    replaced, and the recovery that the driver asks for."""
    nvml, trouble = try_nvml() if machine.root == Path("/") else (None, "")
    given = len(given_gpus(machine.root))
    if nvml is None:
        return judge_no_nvml(trouble, given)
    try:
        return judge_gpu_health(Gpus(nvml).read(at_s=0.0), given)
    finally:
        close_nvml(nvml)


def judge_no_nvml(trouble: str, given: int) -> Finding:
    """As `check_gpu_health`, where NVML tells nothing: by its words, and how many GPUs there are.
    Without a GPU it need not start."""
    if not trouble or not given:
        return Finding(check="GPU errors", result="NVML tells nothing")
    return Finding(
        check="GPU errors",
        result=f"{given} GPUs, and NVML does not start: {trouble}",
        severity="REBOOT",
        meaning="CUDA or NCCL fails as well, and errors of the GPUs are not seen",
        fix="Reboot the machine, so that driver and libraries fit; start a container anew, with "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    )


def _at_driver_start(root: Path) -> int:
    """GPUs that the driver has found when it was loaded, where NVML does not tell."""
    return sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))


def given_gpus(root: Path) -> list[Path]:
    """The driver's files on the GPUs that it has found when it was loaded, of those that are given
    to this process. A container or a job that was given some of its machine's may see all in the
    driver's list."""
    # Who gives or withholds GPUs leaves the driver's control open; a container whose cgroup has
    # lost its rules (`systemctl daemon-reload`) may open neither, and has the files it was given.
    is_given = os.path.lexists if _is_denied(root / "dev/nvidiactl") else _is_given
    return [
        file
        for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
        if (minor := _MINOR.search(file.read_text(errors="replace"))) is not None
        and is_given(root / f"dev/nvidia{minor[1]}")
    ]


def _is_given(device: Path) -> bool:
    """Whether a GPU may be used here. A container has no file of one that it was not given; a
    cgroup, as of Slurm with ConstrainDevices, leaves the file and lets nobody open it. Any other
    error is one of a GPU that was given."""
    return os.path.lexists(device) and not _is_denied(device)


def _is_denied(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_NONBLOCK))  # which waits for no GPU
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def judge_gpu_health(readings: Sequence[Reading], at_driver_start: int = 0) -> Finding:
    """As `check_gpu_health`, of readings of GPUs, and how many there were when the driver was
    loaded. One that NVML gives no hold of has gone, unless it was not given to this process."""
    readings = [one for one in readings if not one.values.get("unanswered")]
    found = [(severity, f"{one.of}: {what}") for one in readings for severity, what in _ills(one)]
    if len(readings) < at_driver_start:
        gone = f"{at_driver_start - len(readings)} of {at_driver_start} GPUs have gone"
        found.append(("ISOLATE", f"{gone} since the driver was loaded"))
    if not found:
        return Finding(check="GPU errors", result="none" if readings else "no GPU")
    worst = worst_severity(severity for severity, _ in found)
    return Finding(
        check="GPU errors",
        result="; ".join(what for _, what in found),
        severity=worst,
        meaning="work on it fails, now or soon",
        fix={
            "ISOLATE": "Replace the machine",
            "REBOOT": "Reboot the machine",
            "RESET": "Reset the GPU (nvidia-smi --gpu-reset -i N), with nothing running on it",
        }.get(worst, "Look again after the next run: nvidia-smi -q -d ECC,ROW_REMAPPER"),
    )


def _ills(gpu: Reading) -> Iterator[tuple[Severity, str]]:
    values = gpu.values
    if values.get("lost"):
        yield "ISOLATE", "the driver cannot reach it"
    if values.get("remap_failed"):
        yield "ISOLATE", "rows of its memory could not be replaced"
    if values.get("remap_pending"):
        yield "RESET", "rows of its memory are replaced when it is reset"
    action, step = recovery_of(int(values.get("recovery_action", 0)))
    if step is not None:
        yield _BY_STEP[step], f"the driver asks: {action}"
    for name, since in (("volatile", "since the driver was loaded"), ("aggregate", "ever")):
        if errors := values.get(f"ecc_uncorrected_{name}"):
            yield "MONITOR", f"{errors:.0f} errors of its memory not corrected {since}"
