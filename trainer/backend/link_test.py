"""Which connections to the other workers of a group do not carry what a collective sends.

A link may pass small packets and drop large ones, or all of one direction. Groups are made over it,
and each of their collectives fails with nobody dead, while Gloo and NCCL do not say at which peer.
So all members listen, connect to all others, and send each a small message and then a large one.
Who has not got all of a peer's in time names that peer. This is no part of any step.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from torch._C._distributed_c10d import PrefixStore

from trainer.backend.aside import make_aside
from trainer.backend.groups import gather
from trainer.backend.interface import family_of, group_addresses
from trainer.backend.link_exchange import Address, exchange
from trainer.backend.rendezvous import Rendezvous

BOUND_S = 10.0
"""A good connection takes milliseconds, and may lose its first packet three times in a row."""


def try_links(
    rendezvous: Rendezvous,
    prefix: str,
    *,
    rank: int,
    size: int,
    leave_now: Callable[[], bool],
    bound_s: float = BOUND_S,
) -> dict[int, int]:
    """Tries this worker's connections to the others of a group. All `size` of them call it at once.

    Args:
        rendezvous: where they meet.
        prefix: new for each test.
        rank: this worker's.
        size: workers in the group.
        leave_now: ends the test.
        bound_s: how long a peer's message may take.

    Returns:
        See `exchange`.

    Raises:
        GroupError: `leave_now` became true, or a peer or the store's answer did not come.
    """
    if size == 1:
        return {}
    own, *_ = group_addresses(rendezvous.host, rendezvous.port)
    with socket.create_server((own, 0), family=family_of(own), backlog=size) as listening:
        peers = _meet(rendezvous, prefix, rank, size, listening, leave_now)
        return exchange(listening, rank, peers, leave_now, bound_s)


def _meet(
    rendezvous: Rendezvous,
    prefix: str,
    rank: int,
    size: int,
    listening: socket.socket,
    leave_now: Callable[[], bool],
) -> dict[int, Address]:
    """Waits until all listen. Returns where each peer does."""
    host, port, *_ = listening.getsockname()
    names = [str(peer) for peer in range(size)]

    with rendezvous.connection(leave_now) as store:
        tell = partial(PrefixStore(prefix, store).set, names[rank], f"{host} {port}")
        make_aside(tell, leave_now, rendezvous.timeout_s)
    with gather(rendezvous, prefix, size, leave_now) as store:
        ask = partial(PrefixStore(prefix, store).multi_get, names)
        told = make_aside(ask, leave_now, rendezvous.timeout_s)
    found = [value.decode().split() for value in told]
    return {peer: (h, int(p)) for peer, (h, p) in enumerate(found) if peer != rank}
