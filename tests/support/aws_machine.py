"""The files of an AWS machine, as far as they tell its kind, devices and versions."""

from __future__ import annotations

from pathlib import Path

PLUGIN_FOLDER = "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"


def write(file: Path, text: str) -> Path:
    """Writes a file and the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def make_machine(
    root: Path,
    *,
    instance: str = "p5.48xlarge",
    devices: int = 32,
    gpus: int = 8,
    plugin: str | None = "1.17.1",
    libfabric: str = "2.3.1amzn3.0",
    installer: str = "1.45.0",
    kernel: str = "6.8.0-1044-aws",
    nccl: str = "2.29.3",
) -> Path:
    """Fills `root` with a machine's files, by default those of a healthy one; returns it."""
    write(root / "sys/devices/virtual/dmi/id/product_name", f"{instance}\n")
    write(root / "proc/sys/kernel/osrelease", f"{kernel}\n")
    write(root / "proc/meminfo", "HugePages_Free:     5128\nHugepagesize:       2048 kB\n")
    write(root / "sys/module/nvidia/version", "580.95.05\n")
    (root / "dev/shm").mkdir(parents=True)
    for number in range(gpus):
        address, half = f"0000:{0x53 + number:02x}:00.0", 2 * number // gpus
        minor = f"Device Minor: \t {number}\n"
        write(root / f"proc/driver/nvidia/gpus/{address}/information", minor)
        write(root / f"sys/bus/pci/devices/{address}/numa_node", f"{half}\n")
        write(root / f"sys/devices/system/node/node{half}/cpulist", "0-191\n")
        write(root / f"dev/nvidia{number}", "")
    for number in range(devices):
        device = root / f"sys/class/infiniband/rdmap{79 + number}s0/device"
        write(device / "vendor", "0x1d0f\n")
        write(device / "device", "0xefa2\n")
        write(device / "numa_node", f"{2 * number // devices}\n")
        write(root / f"dev/infiniband/uverbs{number}", "")
    # A card of another maker is none of EFA's.
    write(root / "sys/class/infiniband/mlx5_0/device/vendor", "0x15b3\n")
    write(root / "sys/class/infiniband/mlx5_0/device/device", "0xefa9\n")
    write(
        root / "opt/amazon/efa_installed_packages",
        f"# EFA installer version: {installer}\n# Debug packages installed: no\n"
        f"# Packages installed:\nefa-config_1.18_all libfabric-aws-bin_{libfabric}_amd64 "
        f"libfabric1-aws_{libfabric}_amd64\n",
    )
    write(root / "opt/amazon/efa/bin/fi_info", "#!/bin/sh\necho 'provider: efa'\n").chmod(0o755)
    if plugin is not None:
        library = root / PLUGIN_FOLDER / "libnccl-net.so"
        write(library, f"\x7fELF\0Initializing aws-ofi-nccl {plugin}-aws\0")
        write(root / "etc/ld.so.conf.d/000_ofi_nccl.conf", f"/{PLUGIN_FOLDER}\n")
    write(root / f"usr/lib/x86_64-linux-gnu/libnccl.so.{nccl}", "")
    return root
