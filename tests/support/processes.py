"""Some processes that play a test together: they meet in one store, and one of them may be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Literal

import torch.distributed as dist
import torch.multiprocessing as mp

from health.process import is_ending, read_state
from tests.support.fabric import Fabric
from trainer.backend.polling import poll_until

TIMEOUT_S = 60.0
"""Of every group, and of all that is waited for."""
PATIENCE = timedelta(seconds=TIMEOUT_S)

Loss = Literal["SIGKILL", "SIGSTOP"]
"""What is done to a process that is lost; for good, or while the test lasts."""


def lose_itself(loss: Loss) -> None:
    """Sends this process the signal. Comes back from a SIGSTOP only if somebody lets it go on."""
    os.kill(os.getpid(), getattr(signal, loss))


def play(
    body: Callable[..., None],
    fabric: Fabric,
    *arguments: object,
    processes: int,
    dies: int | None = None,
) -> dist.TCPStore:
    """Runs `body(number, port, fabric, *arguments)` in so many processes, and calls the others to
    leave generation 1 as a node's agent does: when the one that `dies` is about to end, or stands
    still. Returns the store in which they meet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = mp.start_processes(
        body,
        args=(store.port, fabric, *arguments),
        nprocs=processes,
        join=False,
        daemon=True,
        start_method="forkserver",
    )
    lost = None if dies is None else running.processes[dies]
    with killed_after(running):
        if lost is not None:
            del running.sentinels[lost.sentinel]
            poll_until(lambda: _is_lost(lost), bool, TIMEOUT_S)
            store.set("died", str(time.monotonic()))
            store.set("fault 1", "")
        while not running.join():
            pass
    if lost is not None:
        assert lost.exitcode == -signal.SIGKILL, "it was to be lost, and ended"
    return store


@contextlib.contextmanager
def killed_after(running: mp.ProcessContext) -> Iterator[None]:
    """Whatever ends the block, none of the processes is left: they would keep the GPU of the tests
    that follow."""
    try:
        yield
    finally:
        for process in running.processes:
            process.kill()
            process.join()


def _is_lost(process: BaseProcess) -> bool:
    assert process.pid is not None
    stopped = read_state(process.pid) == "T"
    return stopped or is_ending(process.pid) or not process.is_alive()
