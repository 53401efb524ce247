"""Checks of EFA: its devices, its libraries, and the environment that NCCL would see."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastic.doctor.finding import Finding
from elastic.doctor.machine import Machine
from trainer.backend.efa_facts import EfaFacts, Version
from trainer.backend.efa_settings import plan_efa

FI_INFO_S = 10.0
"""How long libfabric may look for its devices."""

_DEFAULT_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu")
"""Where the loader looks without being told."""


def check_instance(machine: Machine) -> Finding:
    """What kind of machine it is; all else is held against that."""
    name = machine.facts.instance or "not known"
    return Finding(
        check="instance", result=name if machine.kind else f"{name}: no settings for EFA"
    )


def check_devices(machine: Machine) -> Finding:
    """Whether all EFA devices are there, and can be opened."""
    kind, count = machine.kind, len(machine.facts.devices)
    if kind is None:
        return Finding(check="EFA devices", result="none" if count == 0 else f"all {count}")
    result = f"{count} of {kind.devices}"
    if count == 0:
        return Finding(
            check="EFA devices",
            result=result,
            severity="ISOLATE",
            meaning="NCCL goes over TCP, 10 to 100 times slower",
            fix="Launch a machine with EFA interfaces; they cannot be attached later. In a "
            f"container, ask for vpc.amazonaws.com/efa: {kind.devices}",
        )
    doors = sum(1 for _ in (machine.root / "dev/infiniband").glob("uverbs*"))
    if doors < count:
        return Finding(
            check="EFA devices",
            result=f"{result}, {doors} in /dev/infiniband",
            severity="RESET",
            meaning="libfabric finds no provider, and NCCL goes over TCP",
            fix="Give the container /dev/infiniband; on a machine, modprobe ib_uverbs",
        )
    if count < kind.devices:
        return Finding(
            check="EFA devices",
            result=result,
            severity="MONITOR",
            meaning="the rest of the bandwidth is lost",
            fix="On a p5en look again in 15 s, it comes up late; else launch the machine with an "
            "EFA interface on each network card",
        )
    return Finding(check="EFA devices", result=f"all {count}")


def check_provider(machine: Machine) -> Finding:
    """Whether libfabric can use the devices."""
    if not machine.uses_efa:
        return Finding(check="EFA provider", result="not needed")
    program = machine.root / "opt/amazon/efa/bin/fi_info"
    try:
        done = subprocess.run(
            [program, "-p", "efa"], capture_output=True, text=True, timeout=FI_INFO_S
        )
    except FileNotFoundError:
        result = f"{program} is missing"
    except subprocess.TimeoutExpired:
        result = f"fi_info has not answered in {FI_INFO_S:g} s"
    else:
        if done.returncode == 0 and "provider: efa" in done.stdout:
            return Finding(check="EFA provider", result="efa")
        said = " ".join((done.stdout + done.stderr).split())
        result = f"fi_info says: {said or f'exit status {done.returncode}'}"
    return Finding(
        check="EFA provider",
        result=result,
        severity="RESET",
        meaning="NCCL goes over TCP, 10 to 100 times slower",
        fix="Install EFA (efa_installer.sh -y; in an image with --skip-kmod); modprobe efa",
    )


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What is known of the versions of one part."""

    version: Callable[[EfaFacts], Version | None]
    """The one that is there."""
    least: Version
    """The first good one, on EFA."""
    meaning: str
    """What comes of an older one."""
    fix: str
    """Which one to install."""
    bad: tuple[Version, Version] | None = None
    """Those that are no good anywhere, from the first to before the second."""
    last_digits: int = 1
    """That the last number of a version has at least, as its maker writes it."""


_KNOWN = {
    "EFA installer": _Known(
        version=lambda facts: facts.installer,
        least=(1, 29, 1),
        meaning="NCCL 2.19 and later hand it memory that it cannot register",
        fix="Install EFA 1.29.1 or later",
    ),
    "libfabric": _Known(
        version=lambda facts: facts.libfabric,
        least=(1, 18),
        meaning="GPUDirect RDMA must be asked for",
        fix="Install EFA 1.29.1 or later, which brings a newer one",
    ),
    "aws-ofi-nccl": _Known(
        version=lambda facts: facts.plugin,
        least=(1, 7, 3),
        meaning="AWS recommends it from there on",
        fix="Install EFA with the plugin, or aws-ofi-nccl 1.7.3 or later",
    ),
    "NCCL": _Known(
        version=lambda facts: facts.nccl,
        least=(2, 18, 5),
        meaning="EFA fails beside NVLink's switches before",
        fix="Install a torch with NCCL 2.28.9 or later",
        bad=((2, 28, 3), (2, 28, 9)),
    ),
    "GPU driver": _Known(
        version=lambda facts: facts.gpu_driver,
        least=(525, 60, 13),
        meaning="CUDA 12 does not run on it",
        fix="Install NVIDIA's driver 580 or later, which CUDA 13 needs",
        last_digits=2,  # 580.95.05
    ),
}
"""Part -> versions known to be good. Source: aws/aws-ofi-nccl, doc/efa-env-var.md and
src/platform-aws.cpp; efa-cheatsheet.md of awsome-distributed-training; NVIDIA's table of CUDA and
drivers; nvidia-resiliency-ext 0.7 for NCCL 2.28.3 to 2.28.8, which do not restart in a process."""

_CUDA_13_DRIVER: Version = (580,)
"""The first branch that CUDA 13 runs on. NVIDIA's table."""


def _check_version(part: str, machine: Machine) -> Finding:
    """One that nothing tells passes: that a part is missing is for other checks to see."""
    known = _KNOWN[part]
    version = known.version(machine.facts)
    if version is None:
        return Finding(check=part, result="version not known")
    *others, last = version
    result = f"version {'.'.join([*map(str, others), f'{last:0{known.last_digits}}'])}"
    if machine.uses_efa and version < known.least:
        return Finding(
            check=part, result=result, severity="RESET", meaning=known.meaning, fix=known.fix
        )
    if known.bad is not None and known.bad[0] <= version < known.bad[1]:
        return Finding(
            check=part,
            result=result,
            severity="MONITOR",
            meaning="groups that are made anew in a process may hang",
            fix=known.fix,
        )
    return Finding(check=part, result=result)


def _check_driver(machine: Machine) -> Finding:
    """As the others, and whether the CUDA of torch's wheels runs on it, or on NVIDIA's package that
    makes up for an old one."""
    found = _check_version("GPU driver", machine)
    driver, cuda = machine.facts.gpu_driver, machine.facts.cuda
    if driver is None or cuda is None or cuda < 13 or driver >= _CUDA_13_DRIVER:
        return found
    made_up_for = any(machine.root.glob("usr/local/cuda*/compat/libcuda.so*"))
    if made_up_for or found.severity != "OK":
        return found
    return replace(
        found,
        severity="RESET",
        meaning=f"CUDA {cuda}, which torch has brought, does not run on it",
        fix="Install NVIDIA's driver 580 or later, or its package cuda-compat",
    )


VERSION_CHECKS: dict[str, Callable[[Machine], Finding]] = {
    **{part: partial(_check_version, part) for part in _KNOWN},
    "GPU driver": _check_driver,
}
"""A check for each part."""


def check_plugin(machine: Machine) -> Finding:
    """Whether NCCL finds the plugin that brings it to EFA."""
    if not machine.uses_efa:
        return Finding(check="NCCL plugin", result="not needed")
    named = machine.environment.get("NCCL_NET_PLUGIN")
    if named is not None:
        return _check_named_plugin(machine, named)
    path = machine.facts.plugin_path
    if path is None:
        return Finding(
            check="NCCL plugin",
            result="no libnccl-net.so",
            severity="RESET",
            meaning="NCCL goes over TCP, 10 to 100 times slower",
            fix="Install a current EFA, which brings aws-ofi-nccl",
        )
    folder = f"/{Path(path).parent.relative_to(machine.root)}"
    if folder in _loader_folders(machine):
        return Finding(check="NCCL plugin", result=f"in {folder}")
    return Finding(
        check="NCCL plugin",
        result=f"in {folder}, where the loader does not look",
        severity="RESET",
        meaning="NCCL does not find it and goes over TCP",
        fix=f"Name {folder} in LD_LIBRARY_PATH where `ray start` is run, or in /etc/ld.so.conf.d",
    )


def _check_named_plugin(machine: Machine, named: str) -> Finding:
    """NCCL loads a library by its path or name, or makes a name of a suffix; there may be several.
    Source: NCCL, src/plugin/net.cc and plugin_open.cc."""
    result = f"NCCL_NET_PLUGIN={named}"
    if any(_is_found(machine, one) for one in named.split(",")):
        return Finding(check="NCCL plugin", result=result)
    return Finding(
        check="NCCL plugin",
        result=f"{result}, which the loader does not find",
        severity="RESET",
        meaning="NCCL does not find it and goes over TCP",
        fix="Unset NCCL_NET_PLUGIN, or give it the path of a library that is there",
    )


def _is_found(machine: Machine, plugin: str) -> bool:
    if "/" in plugin:
        return (machine.root / plugin.lstrip("/")).is_file()
    return any(
        (machine.root / folder.lstrip("/") / library).is_file()
        for folder in _loader_folders(machine)
        for library in (plugin, f"libnccl-net-{plugin}.so")
    )


def _loader_folders(machine: Machine) -> set[str]:
    folders = {*_DEFAULT_FOLDERS, *machine.environment.get("LD_LIBRARY_PATH", "").split(":")}
    for file in (machine.root / "etc/ld.so.conf.d").glob("*.conf"):
        folders.update(file.read_text(encoding="utf-8").split())
    return {folder.rstrip("/") for folder in folders}


def check_environment(machine: Machine) -> Finding:
    """Whether anything that the user has set does harm."""
    plan = plan_efa(machine.facts, machine.environment)
    result = f"sets {len(plan.missing)} of {len(plan.settings)}" if plan.settings else "not needed"
    if not plan.harms:
        return Finding(check="environment", result=result)
    return Finding(
        check="environment",
        result=", ".join(f"{harm.name}={harm.value}" for harm in plan.harms),
        severity="MONITOR",
        meaning="; ".join(harm.reason for harm in plan.harms),
        fix=f"Unset {', '.join(harm.name for harm in plan.harms)}",
    )
