"""Which network interface Gloo listens on: the one that this machine reaches the control plane by.

Left alone, Gloo takes the address that the machine's own name resolves to. On many machines that is
a loopback address (/etc/hosts), to which no other machine can connect.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Read by torch whenever it makes a Gloo group, sub-groups of a device mesh included."""

_SIOCGIFADDR = 0x8915
_NAME_BYTES, _ADDRESS_AT = 256, 20


def listen_towards(host: str, port: int) -> None:
    """Has Gloo groups that this process makes from now on listen where `host` is reached from.

    An interface that the user chose (GLOO_SOCKET_IFNAME) stays; where none is found, Gloo's own
    choice does.
    """
    name = interface_of(own_address(host, port))
    if name is not None:
        os.environ.setdefault(GLOO_VARIABLE, name)


def group_addresses(host: str, port: int) -> list[str]:
    """Addresses that Gloo groups of this process listen on, at least one: several where the user
    has named several interfaces. Arguments as for `listen_towards`."""
    names = os.environ.get(GLOO_VARIABLE, "").split(",")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        chosen = [_address_of(probe, name) for name in names if name]
    return [address for address in chosen if address] or [own_address(host, port)]


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`. Sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own


def family_of(address: str) -> socket.AddressFamily:
    """Of a socket at a numeric address. `own_address` is one of IPv6 where the control plane is."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_of(address: str) -> str | None:
    """Name of the interface whose IPv4 address is `address`; None where there is no such one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in names if _address_of(probe, name) == address), None)


def _address_of(probe: socket.socket, name: str) -> str | None:
    request = struct.pack(f"{_NAME_BYTES}s", name.encode())
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])
