"""A worker's network between machines: sets NCCL's environment for EFA, and proves by NCCL's log
that it is used.

NCCL goes on over TCP, 10 to 100 times slower, where anything of EFA is amiss, and says so in its
log alone. Only workers on GPUs use this module.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import IO

from trainer.backend.efa_facts import EfaFacts, read_efa
from trainer.backend.efa_settings import plan_efa
from trainer.backend.nccl_log import parse_nccl_log
from trainer.errors import NetworkError

log = logging.getLogger(__name__)

_DEBUG = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


class NodeNetwork:
    """The network of the machine that this process runs on. Made before NCCL is used for the first
    time: it reads the environment once.

    Args:
        nccl_log: where what NCCL's log holds is copied to once something is wrong. NCCL writes into
            a file of this process, on its machine: a line for each channel of each group to come.
        allow_tcp: NCCL may go over TCP on a machine that has EFA.
        facts: the machine's; None: they are read.
        environment: that NCCL will read.
    """

    def __init__(
        self,
        nccl_log: Path,
        *,
        allow_tcp: bool,
        facts: EfaFacts | None = None,
        environment: MutableMapping[str, str] = os.environ,
    ) -> None:
        self._facts = read_efa() if facts is None else facts
        self._allow_tcp = allow_tcp
        self._nccl_log = nccl_log
        self._log: IO[bytes] | None = None
        self._first = b""
        plan = plan_efa(self._facts, environment)
        for harm in plan.harms:
            log.warning("%s", harm)
        environment.update(plan.missing)
        if self._facts.devices:
            self._log = _open_log(environment)

    def check(self) -> None:
        """Called after a group was made.

        Raises:
            NetworkError: NCCL goes over TCP, although the machine has EFA devices.
        """
        if self._log is None:
            return
        new = self._log.read()
        told = self._first + new  # the plugin says once what it has found
        self._first = self._first or new
        found = parse_nccl_log(told.decode(errors="replace"))
        if not found.is_tcp and found.gpu_direct is not False:
            return
        try:
            self._nccl_log.parent.mkdir(parents=True, exist_ok=True)
            self._nccl_log.write_bytes(told)
        except OSError as error:  # as of a full run directory
            log.warning("what NCCL said is not kept in %s: %s", self._nccl_log, error)
        if found.is_tcp and not self._allow_tcp:
            raise NetworkError(
                str(self._facts.instance),
                len(self._facts.devices),
                found.troubles,
                str(self._nccl_log),
            )
        log.warning(
            "NCCL goes over %s, GPUDirect RDMA is %s; %s tells why",
            "TCP" if found.is_tcp else f"{found.provider or found.name}",
            "on" if found.gpu_direct else "off",
            self._nccl_log,
        )


def _open_log(environment: MutableMapping[str, str]) -> IO[bytes] | None:
    """Has NCCL write what it takes into a file of this process; None where the user has other plans
    for its log."""
    theirs = [name for name in _DEBUG if name in environment]
    if theirs:
        log.warning(
            "%s set by you: whether NCCL uses EFA is not checked; unset it to have it checked",
            " and ".join(theirs),
        )
        return None
    # It has no name, and ends with this process.
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    environment.update(zip(_DEBUG, ("INFO", "INIT,NET", path), strict=True))
    return file
