"""Where the coordinator's process listens: on the address that the cluster knows its machine by.

Whoever reaches the store's port may read its keys and set them (docs/security.md). On other
networks of the machine it is not to be reached.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

from elastic.imports import uncollected
from trainer.backend.silence import watch_silence

log = logging.getLogger(__name__)

_BEATS_BYTES = 1 << 20
"""Room for the beats that come while the event loop is busy; the kernel may grant less."""

_SILENT_S, _PROBE_EVERY_S = 60.0, 20
"""Connections of machines that are gone are closed after so long."""


def open_beats(host: str) -> socket.socket:
    """The socket that the coordinator hears the nodes' beats on."""
    listening = _bind(host, socket.SOCK_DGRAM)
    listening.setblocking(False)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BEATS_BYTES)
    return listening


def host_store(host: str) -> Any:
    """The TCPStore where process groups meet, hosted by this process while it is referred to.

    Args:
        host: this machine's address in the cluster.
    """
    with uncollected():  # every process that calls one imports all of torch
        from torch._C._distributed_c10d import TCPStore

    listening = _bind(host, socket.SOCK_STREAM)
    watch_silence(listening, _SILENT_S, _PROBE_EVERY_S)  # what it accepts inherits that
    own, port, *_ = listening.getsockname()
    return TCPStore(
        own, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _bind(host: str, kind: socket.SocketKind) -> socket.socket:
    """A socket on `host` alone, on a port that the kernel chooses; on all of this machine's
    addresses where that is none of them, as behind an address translation."""
    family = socket.getaddrinfo(host, 0, type=kind)[0][0]
    listening = socket.socket(family, kind)
    try:
        listening.bind((host, 0))
    except OSError as error:
        log.warning("%s is no address of this machine (%s): listening on all", host, error)
        listening.bind(("", 0))
    return listening
