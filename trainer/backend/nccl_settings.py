"""What c10d, NCCL and CUDA must do, and must not do, so that a run outlives a collective that
fails, and none waits for ever.

Clusters export `TORCH_NCCL_*` and `TORCH_DISTRIBUTED_DEBUG` for jobs that end with the first fault.
With those this one would, too, so they are set over whatever the cluster says. Nothing else is
touched here.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

NEEDED = {
    # A failed collective must end in an exception here, not in the end of the process,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # which this one would turn on again,
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # nor may it tell processes that are not in it.
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # An error of the device must not end the process before its worker has said what it was: c10d's
    # watchdog meets it within 0.1 s, where it looks which collectives have ended.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Who waits must hear calls meanwhile.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # The first failure must not make every process that shares the store dump its traces, and end
    # minutes later.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # All connections are made with the communicator: within a collective nothing could end it.
    "NCCL_RUNTIME_CONNECT": "0",
}
"""Name -> the value that survival needs."""

AT_LEAST = {
    # Of collectives that the flight recorder remembers, for our own dumps.
    "TORCH_FR_BUFFER_SIZE": 2000,
    # Hardware queues, 32 at most. A stream that shares one waits there for what others have put
    # before it. Ranks launch a bucket's sum at different places among the collectives of their
    # replica, so each could wait for another in a circle, with nobody lost. CUDA takes 8;
    # clusters export 1 for frameworks that rely on one order. It makes that rare and no more:
    # which streams share a queue is the driver's to say.
    "CUDA_DEVICE_MAX_CONNECTIONS": 32,
}
"""Name -> the least number."""

_told: set[str] = set()


DEBUG = "TORCH_DISTRIBUTED_DEBUG"
"""c10d's debug level, which torch reads when it is imported."""


def limit_debug(environment: MutableMapping[str, str]) -> None:
    """Takes c10d's debug level from DETAIL to INFO, in `environment` and in torch, with one warning
    in a process. With DETAIL each group, on Gloo as well, gets a second one, made on the thread
    that asks for it, which hears no call; and NCCL's failed collectives end the process. Called
    before the first group is made."""
    if environment.get(DEBUG, "").upper() == "DETAIL":
        import torch.distributed as dist  # here: `elastic doctor` lists the settings without torch

        _set(environment, DEBUG, "INFO", fits=False)
        dist.set_debug_level(dist.DebugLevel.INFO)


def settle(environment: MutableMapping[str, str]) -> None:
    """Sets what must be so on a GPU in `environment`, with one warning in a process for each value
    that somebody had set otherwise. Called before CUDA starts."""
    for name, value in NEEDED.items():
        _set(environment, name, value, fits=environment.get(name) in (None, value))
    for name, least in AT_LEAST.items():
        there = environment.get(name, str(least))
        _set(environment, name, str(least), fits=there.isdecimal() and int(there) >= least)


def _set(environment: MutableMapping[str, str], name: str, value: str, *, fits: bool) -> None:
    if not fits and name not in _told:
        _told.add(name)
        log.warning(
            "%s=%s is set to %s: with it a run does not outlive a failed collective, may stand "
            "still, or loses its traces; unset it to be rid of this warning",
            name,
            environment[name],
            value,
        )
    if not fits or name not in environment:
        environment[name] = value
