"""A path between two hosts (`hosts.py`) that loses large packets without a word: an MTU black hole.

The two get a path of their own, over a switch whose ports take smaller frames than their machines
send, as where someone forgot jumbo frames on one of them. What is larger is dropped there, no ICMP
message tells of it, and small packets pass: connections are made, and stand still. The way to all
other hosts stays as it was. Connections that are open move over to it.
"""

from __future__ import annotations

from tests.support.hosts import HEAD, Network, ip, ip_of

LARGEST_BYTES = 600
"""Of the packets that pass; IPv4 headers included."""


def dig_black_hole(network: Network, one: int, other: int) -> None:
    """From now on packets of more than `LARGEST_BYTES` between two hosts are lost."""
    head, switch = network.namespace(HEAD), f"narrow{one}-{other}"
    ip("-n", head, "link", "add", "name", switch, "type", "bridge")
    ip("-n", head, "link", "set", switch, "up")
    for host, peer in ((one, other), (other, one)):
        name, port, side = network.namespace(host), f"thin{host}-{peer}", f"to{peer}"
        # Else segments of 64 KiB would pass as they are: veth has no wire.
        whole = ["mtu", "1500", "gso_max_segs", "1"]
        pair = ["type", "veth", "peer", "name", side, "netns", name, *whole]
        ip("-n", head, "link", "add", "name", port, "mtu", str(LARGEST_BYTES), *pair)
        ip("-n", head, "link", "set", port, "master", switch, "up")
        ip("-n", name, "link", "set", side, "up")
    for host, peer in ((one, other), (other, one)):
        own = ["dev", f"to{peer}", "src", ip_of(host)]
        ip("-n", network.namespace(host), "route", "add", f"{ip_of(peer)}/32", *own)
