"""What NCCL's own log says of the network that it took. Pure.

Source of the lines: aws/aws-ofi-nccl, src/nccl_ofi_net.cpp; NVIDIA/nccl, src/net.cc, paths.cc and
transport/net.cc. They differ between versions in case, and in what stands behind them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_PROVIDER = re.compile(
    r"NET/OFI Selected [Pp]rovider is (.+?)(?:, fabric is \S+)?(?: \(found (\d+) nics\))?\s*$",
    re.MULTILINE,
)
_DIRECT = re.compile(r"GPU Direct RDMA (Enabled|Disabled) for GPU")
_CHANNEL = re.compile(r"via NET/[^/\n]+/\d+(\S*)")
_TROUBLE = re.compile(
    r"NCCL WARN (.+?)\s*$|NCCL INFO (NET/.*(?:failed|No eligible|No plugin|Could not find).*?)\s*$",
    re.MULTILINE,
)
_TROUBLES = 3
"""As many as a reader of an error looks at."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """How a process's NCCL groups reach other machines."""

    name: str | None = None
    """As NCCL calls it: `Libfabric`, `AWS Libfabric`, `IB`, `Socket`; None: no group was made."""
    provider: str | None = None
    """Libfabric's, such as `efa`; None where NCCL did not come to it."""
    devices: int | None = None
    """That the provider found."""
    gpu_direct: bool | None = None
    """Whether the devices read and write the GPU's memory; None: nothing tells it yet."""
    troubles: tuple[str, ...] = ()
    """What went wrong on the way, in NCCL's words, the last ones."""

    @property
    def is_tcp(self) -> bool:
        """Whether bytes go over TCP. False where nothing tells it."""
        return self.name == "Socket" or (self.provider or "").startswith("tcp")


def parse_nccl_log(text: str) -> Network:
    """Reads a log of `NCCL_DEBUG=INFO` with the subsystems INIT and NET, of one process."""
    networks, providers = _NETWORK.findall(text), _PROVIDER.findall(text)
    provider, devices = providers[-1] if providers else (None, "")
    return Network(
        name=networks[-1] if networks else None,
        provider=provider,
        devices=int(devices) if devices else None,
        gpu_direct=_gpu_direct(text),
        troubles=tuple(warned or told for warned, told in _TROUBLE.findall(text))[-_TROUBLES:],
    )


def _gpu_direct(text: str) -> bool | None:
    """What the channels say counts; before there are any, what NCCL found possible for each pair
    of GPU and device."""
    channels = _CHANNEL.findall(text)
    if channels:
        return all("GDRDMA" in rest for rest in channels)
    possible = _DIRECT.findall(text)
    return "Enabled" in possible if possible else None
