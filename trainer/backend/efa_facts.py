"""What an AWS machine says of its EFA devices and of the libraries that drive them.

Reads files alone: no network, no program, no library is loaded. Imports without torch. What may not
be read is not known, as what is not there.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]

_AMAZON = "0x1d0f"
"""PCI vendor of EFA devices; their device ids begin with 0xefa. Their names are `efa_0` or
`rdmap16s27`, by the driver's version, and tell nothing. Source: aws/eks-node-monitoring-agent,
monitors/networking/efa/efa.go."""

_INSTALLED = "opt/amazon/efa_installed_packages"
_LIBFABRIC = ("opt/amazon/efa/lib64", "opt/amazon/efa/lib")
_PLUGIN_FOLDERS = (
    *("opt/amazon/ofi-nccl/lib64", "opt/amazon/ofi-nccl/lib"),
    *("opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "opt/aws-ofi-nccl/lib"),
    *("opt/aws-ofi-nccl/install/lib", "usr/local/lib"),
)
_PLUGIN_NAMES = ("libnccl-net.so", "libnccl-net-ofi.so")
_TUNER_NAME = "libnccl-ofi-tuner.so"
_NCCL_FOLDERS = (
    *("opt/nccl/build/lib", "usr/local/cuda/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib64"),
)


@dataclass(frozen=True, kw_only=True)
class EfaFacts:
    """One machine. A version is None where nothing tells it."""

    instance: str | None = None
    """EC2's name of the machine's type, such as `p5.48xlarge`; the product's name elsewhere."""
    devices: tuple[str, ...] = ()
    """EFA devices that this process can see."""
    kernel: Version | None = None
    """Of Linux."""
    gpu_driver: Version | None = None
    """NVIDIA's kernel module."""
    installer: Version | None = None
    """EFA's installer."""
    libfabric: Version | None = None
    """The library that reaches the devices."""
    plugin: Version | None = None
    """aws-ofi-nccl, which brings NCCL to libfabric."""
    plugin_path: str | None = None
    """Its library."""
    tuner_path: str | None = None
    """Its tuner, where that is a library of its own."""
    nccl: Version | None = None
    """The NCCL that torch loads."""
    cuda: int | None = None
    """Of which CUDA torch's wheels are, by that of NCCL."""


def read_efa(root: Path = Path("/"), packages: Sequence[str] = sys.path) -> EfaFacts:
    """Reads the facts of the machine whose files begin at `root`.

    Args:
        root: `/`, or a copy of the files of a machine.
        packages: where Python's packages lie; torch's wheels bring NCCL as one of them.
    """
    plugin = _first(root / folder / name for folder in _PLUGIN_FOLDERS for name in _PLUGIN_NAMES)
    tuner = _first(root / folder / _TUNER_NAME for folder in _PLUGIN_FOLDERS)
    wheel = _wheel(packages)
    return EfaFacts(
        instance=_text(root / "sys/devices/virtual/dmi/id/product_name") or None,
        devices=tuple(_devices(root / "sys/class/infiniband")),
        kernel=version_in(_text(root / "proc/sys/kernel/osrelease")),
        gpu_driver=version_in(_text(root / "sys/module/nvidia/version")),
        installer=version_in(_text(root / _INSTALLED), r"EFA installer version: "),
        libfabric=_libfabric(root),
        plugin=None if plugin is None else _plugin_version(plugin),
        plugin_path=None if plugin is None else str(plugin),
        tuner_path=None if tuner is None else str(tuner),
        nccl=_nccl(root, wheel),
        cuda=_cuda(wheel),
    )


def version_in(text: str, before: str = "") -> Version | None:
    """The first version in `text`, or the first after what matches `before`."""
    found = re.search(rf"{before}(\d+(?:\.\d+)+)", text)
    return None if found is None else tuple(map(int, found[1].split(".")))


def _devices(folder: Path) -> Iterator[str]:
    for device in sorted(_files(folder, "*")):
        vendor, kind = _text(device / "device/vendor"), _text(device / "device/device")
        if vendor == _AMAZON and kind.startswith("0xefa"):
            yield device.name


def _libfabric(root: Path) -> Version | None:
    for folder in _LIBFABRIC:
        found = version_in(_text(root / folder / "pkgconfig/libfabric.pc"), r"Version: ")
        if found is not None:
            return found
    return version_in(_text(root / _INSTALLED), r"libfabric[a-z0-9-]*[-_]")


def _plugin_version(library: Path) -> Version | None:
    """What the plugin says of itself in NCCL's log stands in its library."""
    with (
        contextlib.suppress(OSError),
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        found = re.search(rb"aws-ofi-nccl \d+(\.\d+)+", data)
        return None if found is None else version_in(found[0].decode())
    return None


def _wheel(packages: Sequence[str]) -> str:
    """The name of NCCL's; empty where there is none."""
    found = (
        p.name for folder in packages for p in _files(Path(folder), "nvidia_nccl_cu*.dist-info")
    )
    return next(found, "")


def _cuda(wheel: str) -> int | None:
    found = re.match(r"nvidia_nccl_cu(\d+)-", wheel)
    return None if found is None else int(found[1])


def _nccl(root: Path, wheel: str) -> Version | None:
    if wheel:
        return version_in(wheel, r"nvidia_nccl_cu\d+-")
    libraries = (p for folder in _NCCL_FOLDERS for p in _files(root / folder, "libnccl.so.2.*"))
    library = next(libraries, None)
    return None if library is None else version_in(library.name, r"libnccl\.so\.")


def _first(places: Iterator[Path]) -> Path | None:
    return next(filter(_holds_something, places), None)


def _holds_something(file: Path) -> bool:
    try:
        return file.is_file() and file.stat().st_size > 0
    except OSError:
        return False


def _files(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
