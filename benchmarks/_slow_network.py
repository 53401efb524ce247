"""Hosts whose network is slow on purpose: a relay in user space between network namespaces.

Each host's `uplink` is a TUN device that one process reads: packets wait there for the latency and
are then written to the device of the host that they are for. `tbf` limits what a host sends. netem,
which would delay packets in the kernel, is not in every kernel.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from tests.support.hosts import Network, enter, ip, ip_of

MTU = 16_000
_BURST = "32k"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DESTINATION_AT = 16
"""Of an IPv4 header."""


class SlowNetwork(Network):
    """A context manager. Needs root, iproute2 and /dev/net/tun.

    Args:
        count: hosts beside the head, which has no network here.
        latency_s: of each packet between two hosts, one way, beside the relay's own.
        rate: what each host can send, such as 400mbit; None: no limit.
    """

    def __init__(self, count: int, *, latency_s: float, rate: str | None) -> None:
        super().__init__(count)
        self._latency_s, self._rate = latency_s, rate
        self._relay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SlowNetwork:
        super().__enter__()
        return self

    def _wire(self) -> None:
        for name in self._names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        command = ["-m", "benchmarks._slow_network", "--latency-s", str(self._latency_s)]
        self._relay = subprocess.Popen(
            [sys.executable, *command, *self.hosts], env=self.environment, stdout=subprocess.PIPE
        )
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == b"ready\n", "the relay did not start"
        for host, name in enumerate(self.hosts):
            ip("-n", name, "address", "add", f"{ip_of(host)}/24", "dev", "uplink")
            ip("-n", name, "link", "set", "uplink", "mtu", str(MTU), "up")
            # A connection that was idle would begin slowly again.
            setting = "net.ipv4.tcp_slow_start_after_idle=0"
            ip("netns", "exec", name, "sysctl", "-qw", setting)
            if self._rate is not None:
                shape = ["rate", self._rate, "burst", _BURST, "latency", "1s"]
                ip(
                    "netns",
                    "exec",
                    name,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    "uplink",
                    "root",
                    "tbf",
                    *shape,
                )

    @property
    def relay_cpu_s(self) -> float:
        """CPU time that the relay has used."""
        assert self._relay is not None
        fields = Path(f"/proc/{self._relay.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def remove(self) -> None:
        """See Network; the relay ends, too."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        super().remove()


def open_uplink(namespace: str) -> int:
    """Makes the TUN device of a namespace; this process goes there for it. Returns the end that
    packets are read from and written to."""
    enter(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"uplink", _IFF_TUN | _IFF_NO_PI))
    return device


def relay(devices: list[int], latency_s: float) -> None:
    """Hands packets on for ever. Device i is that of host i."""
    address = {bytes(map(int, ip_of(host).split("."))): fd for host, fd in enumerate(devices)}
    poll = select.epoll()
    for device in devices:
        poll.register(device, select.EPOLLIN)
    waiting: deque[tuple[float, int, bytes]] = deque()  # all wait equally long, so it is in order
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else -1
        if wait_s <= 0 and waiting:
            _, device, packet = waiting.popleft()
            os.write(device, packet)
            wait_s = 0.0
        for ready, _ in poll.poll(wait_s):
            packet = os.read(ready, MTU + 100)
            to = address.get(packet[_DESTINATION_AT : _DESTINATION_AT + 4])
            if to is not None:  # the kernel speaks IPv6 and multicast as well
                waiting.append((time.monotonic() + latency_s, to, packet))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency-s", type=float, required=True)
    parser.add_argument("namespaces", nargs="+")
    options = parser.parse_args()
    os.nice(-10)  # a network waits for no core
    uplinks = [open_uplink(name) for name in options.namespaces]
    print("ready", flush=True)
    relay(uplinks, options.latency_s)
