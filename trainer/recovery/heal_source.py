"""The source of a heal: a healthy worker, which sends a copy of its state while it trains on.

    heal-copy      one for each stream: copies its blocks of the state to the host, begun at a step
                   boundary; whatever changes the state waits for these alone
    heal-listen    one for each address: takes connections
    heal-send      one for each connection: sends its stream's blocks as soon as they are copied

The host holds the state once, however many newcomers there are, and lets go of each block that all
of them have been sent. On CUDA one block for each stream is pinned, no more (`staging.py`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

from trainer.backend.interface import family_of, group_addresses
from trainer.engine.engine import Engine
from trainer.recovery.heal_wire import (
    Facts,
    Meeting,
    Pace,
    Place,
    Sockets,
    Stream,
    send_block,
    welcome,
)
from trainer.recovery.staging import Stage
from trainer.recovery.state_blocks import Block, cut, flat_state

log = logging.getLogger(__name__)

MOST_STRANGERS = 64
"""Connections at once that have not proved whose they are, beside those that are expected."""
_PAUSE_S = 1.0
"""Before connections are taken again, where there was no descriptor or no thread for one."""

_Blocks = SimpleQueue[tuple[int, torch.Tensor] | None]
"""What one stream is to send: the position of each block and its bytes; None: no more."""


class Source:
    """A healthy worker's part. It never waits for a newcomer; `close` when leaving the generation.

    Args:
        engine: the state, at a step boundary now.
        skipped_in_a_row: of its progress.
        meeting: with its newcomers.
    """

    def __init__(self, engine: Engine, skipped_in_a_row: int, meeting: Meeting) -> None:
        state = flat_state(engine)
        self._facts = Facts(
            sum(part.numel() for part in state), engine.state.optimizer_steps, skipped_in_a_row
        )
        self._meeting, self._sockets = meeting, Sockets()
        self._pace = Pace(meeting.bytes_per_s, self._sockets)
        self._unserved: dict[Stream, _Blocks] = {
            Stream(newcomer, number): SimpleQueue()
            for newcomer in range(meeting.newcomers)
            for number in range(meeting.streams)
        }
        self._entering = threading.Lock()
        self._unproven = deque[socket.socket]()
        """Connections that have not proved whose they are, the oldest first."""
        self._lost = threading.Event()
        """A block could not be copied: the others are of no use, and hold the step up."""
        # The threads get tensors and not the engine, which they would keep alive.
        blocks = cut(state)
        self._copying = [
            self._start_copy(number, deque(blocks[number :: meeting.streams]), engine.device)
            for number in range(meeting.streams)
        ]
        self._start("heal-listen", self._open)

    @property
    def copies(self) -> bool:
        """Whether the state is still being copied."""
        return any(copying.is_alive() for copying in self._copying)

    def await_copy(self) -> None:
        """Called before the state changes."""
        for copying in self._copying:
            copying.join()

    def close(self) -> None:
        """Ends the sending. The threads end by themselves."""
        self._sockets.stop()
        self._unserved.clear()

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:
                if not self._sockets.stopped():
                    log.warning("a heal was not completed: %s", error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    # -- the copy ----------------------------------------------------------------------------------

    def _start_copy(
        self, number: int, blocks: deque[Block], device: torch.device
    ) -> threading.Thread:
        stage = Stage(device, number)
        stage.follow()
        queues = [queue for stream, queue in self._unserved.items() if stream.number == number]
        return self._start("heal-copy", partial(self._copy, stage, blocks, queues))

    def _copy(self, stage: Stage, blocks: deque[Block], queues: list[_Blocks]) -> None:
        """The blocks of one stream, in the order in which every newcomer's takes them."""
        try:
            while blocks and not self._sockets.stopped() and not self._lost.is_set():
                block = blocks.popleft()
                copied = _host_bytes(block.size_bytes)
                stage.copy(block, copied)
                for queue in queues:
                    queue.put((block.position, copied))
        except Exception:
            self._lost.set()
            raise
        finally:
            blocks.clear()
            for queue in queues:
                queue.put(None)

    # -- the newcomers -----------------------------------------------------------------------------

    def _open(self) -> None:
        """Listens on each address, and tells the newcomers, who would wait for it: of none where it
        cannot."""
        meet = self._meeting.rendezvous
        places: list[Place] = []
        try:
            for host in group_addresses(meet.host, meet.port):
                one = socket.create_server((host, 0), family=family_of(host))
                place = one.getsockname()[:2]
                self._start("heal-listen", partial(self._take_all, one))
                places.append(place)
        finally:
            self._meeting.tell(places, self._sockets.stopped)

    def _take_all(self, listening: socket.socket) -> None:
        """Takes connections, until `close`. One that cannot be taken, as where this process has no
        descriptor or thread left, does not end that."""
        told = False
        with self._sockets.holding(listening):
            while True:
                try:
                    self._take(listening)
                except (OSError, RuntimeError) as error:
                    if not (told or self._sockets.stopped()):
                        told = True
                        log.warning("a connection for a heal was not taken: %s", error)
                    self._sockets.sleep(_PAUSE_S)

    def _take(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with self._entering:
            self._unproven.append(connection)
            if len(self._unproven) > MOST_STRANGERS + len(self._unserved):
                with contextlib.suppress(OSError):  # it has gone by itself
                    self._unproven.popleft().shutdown(socket.SHUT_RDWR)
        try:
            self._start("heal-send", partial(self._serve, connection))
        except RuntimeError:
            self._has_entered(connection)
            connection.close()
            raise

    def _has_entered(self, connection: socket.socket) -> None:
        """It has proved whose it is, or will not."""
        with self._entering, contextlib.suppress(ValueError):  # it was shut down as the oldest
            self._unproven.remove(connection)

    def _serve(self, connection: socket.socket) -> None:
        with self._sockets.holding(connection):
            try:
                stream = welcome(connection, self._meeting, self._facts)
            finally:
                self._has_entered(connection)
            blocks = self._unserved.pop(stream, None)
            while blocks is not None and (block := blocks.get()) is not None:
                position, data = block
                self._pace.wait(data.numel())
                send_block(connection, position, data.numpy().data)


def _host_bytes(count: int) -> torch.Tensor:
    """Memory that the kernel has back as soon as nothing refers to it."""
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)
