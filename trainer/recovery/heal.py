"""Heal: the copy of model and optimizer state into a replica that has none, while the others train.

    source     copies its state at a step boundary, in a thread, and sends the copy in blocks over
               TCP (`heal_source.py`, `heal_wire.py`)
    newcomer   takes part in every reduce with no lanes, keeps the summed gradients, receives the
               state in threads, and applies the kept steps in order: it has caught up

Nobody waits for anybody: the source's step waits for the copy alone, which is made while forward
and backward compute. Each (shard, tensor) heals from the same one of a healthy replica, in
parallel. A heal that is so slow that the host cannot keep the steps meanwhile has failed, and
begins again. Design: docs/decisions/012-heal-without-stalling.md, 040-heals-over-tcp.md.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from statistics import median

import torch

from trainer.backend.interface import family_of
from trainer.backend.origin import lasting_device_error
from trainer.backend.polling import LEFT
from trainer.engine.engine import Engine
from trainer.errors import GroupError, HealError
from trainer.recovery.backlog import Backlog
from trainer.recovery.heal_wire import Facts, Meeting, Place, Sockets, Stream, enter, receive_block
from trainer.recovery.state_blocks import Block, cut, flat_state
from trainer.replication.step_commit import Commit
from trainer.streams import stream_for

_CATCH_UP_SHARE = 0.5
"""Of a step's time that a newcomer applies kept steps in: its peers wait for it in the reduce."""
_STEPS = 5
"""Whose median that time is: an evaluation, or a stall, that comes after one of them is no step."""


class Newcomer:
    """A worker without state: what it receives, and the steps committed meanwhile.

    Args:
        engine: gets the state.
        meeting: with the source.
        number: among the source's newcomers.
        clip_norm: of the optimizer.
        backlog: where the steps are kept.
    """

    def __init__(
        self,
        engine: Engine,
        meeting: Meeting,
        *,
        number: int = 0,
        clip_norm: float,
        backlog: Backlog | None = None,
    ) -> None:
        self._engine, self._clip_norm = engine, clip_norm
        self._meeting, self._number, self._sockets = meeting, number, Sockets()
        self._backlog = Backlog() if backlog is None else backlog
        self._concluding = threading.Lock()
        self._arrived = False
        self._kept_at = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        """What the latest steps took, with what came between some of them."""
        self._half_applied = False
        """A kept step was begun on, and an exception has ended it: what is here is of no step."""
        self.skipped_in_a_row = 0
        """Of the state, up to the last step applied."""
        self.started_at = time.monotonic()
        self.bytes = sum(part.numel() for part in flat_state(engine))
        """Of state to receive, each once."""
        self.steps_behind = 0
        """The most steps that it had to make up for."""
        self._received = [0] * meeting.streams
        self._failure: str | None = None
        self._failed = False
        engine.state.await_copy()  # of a save before this worker lost its state
        self._stream = stream_for("heal", engine.device) if engine.device.type == "cuda" else None
        if self._stream is not None:  # on the current one threads would wait for the whole step
            self._stream.wait_stream(torch.cuda.current_stream(engine.device))
        self._thread = threading.Thread(target=self._run, name="heal-target", daemon=True)
        self._thread.start()

    @property
    def caught_up(self) -> bool:
        """Whether the state is that of the last committed step."""
        return self._arrived and not self._backlog

    def take_failure(self) -> str | None:
        """Why the state will not arrive; told once."""
        failure, self._failure = self._failure, None
        return failure

    def keep(self, commit: Commit) -> None:
        """A step was committed: its gradient is kept on the host until the state is there.

        Where there is no room for it, the heal has failed if the state is still on its way; else
        the oldest step is applied at once, and the peers wait for that.
        """
        if self._failed:
            return
        gradient = self._engine.gradient
        no_room = self._backlog.no_room(gradient.nbytes)
        if no_room is not None and self._fail(self._too_slow(no_room)):
            return
        self._backlog.keep(commit, gradient)
        if self._failed:  # meanwhile: copying takes its time
            self._backlog.clear()
            return
        if no_room is not None:
            self._apply_oldest()
        self.steps_behind = max(self.steps_behind, len(self._backlog))
        now = time.monotonic()
        self._steps_s.append(now - self._kept_at)
        self._kept_at = now

    @property
    def may_catch_up(self) -> bool:
        """Whether the state is there, and lacks steps that are kept."""
        return self._arrived and bool(self._backlog)

    def catch_up(self) -> None:
        """Applies kept steps for a while, one at least. Called before the reduce, in which the
        others still compute, where it `may_catch_up`."""
        until = time.monotonic() + _CATCH_UP_SHARE * median(self._steps_s)
        while self._backlog:
            self._apply_oldest()
            if time.monotonic() > until:
                break

    def finish(self) -> bool:
        """Called when leaving the generation, after `close`: where the state has arrived, applies
        all kept steps, for the source may be gone and this the last copy. Returns whether the state
        is that of the last committed step: never where a step could not be applied.

        The engine's gradient stays: it may be that of a step that others saw committed.
        """
        if self._half_applied:
            return False
        if self._arrived and self._backlog:
            # The device may have no room for another, and this may be the last copy of the state.
            gradient = self._engine.gradient.to("cpu", copy=True)
            while self._backlog:
                self._apply_oldest()
            self._engine.gradient.copy_(gradient)
        return self._arrived

    def _apply_oldest(self) -> None:
        self._half_applied = True
        commit, gradient = self._backlog.take_oldest()
        self._engine.gradient.copy_(gradient)
        if commit.finite:
            self._engine.apply(commit.step, scale=commit.scale(self._clip_norm))
        self.skipped_in_a_row = 0 if commit.finite else self.skipped_in_a_row + 1
        self._half_applied = False

    def close(self) -> None:
        """Ends the receiving, and waits for it, one block at most: the threads keep the engine
        alive, and with it the sockets by whose end the peers of its replica notice."""
        self._sockets.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._accept(self._receive_all())
        except Exception as error:
            # The main thread meets an error of the device, too, and says so.
            if not isinstance(error, torch.AcceleratorError) or lasting_device_error() is None:
                self._fail(str(error))

    def _fail(self, reason: str) -> bool:
        """The state will not arrive; the first reason counts. Returns False where it just has."""
        with self._concluding:
            if self._arrived:
                return False
            if not self._failed:
                self._failure = reason
            self._failed = True
            self._sockets.stop()
        self._backlog.clear()
        return True

    def _too_slow(self, no_room: str) -> str:
        seconds = time.monotonic() - self.started_at
        return (
            f"the state comes too slowly: {sum(self._received):,} of {self.bytes:,} bytes in "
            f"{seconds:.1f} s. Meanwhile {no_room}. Use hosts with more memory, fewer workers on "
            f"each, a faster network, or a higher health.heal_bytes_per_s"
        )

    def _receive_all(self) -> Facts:
        """The state, over all streams. The first that fails ends the others."""
        meeting = self._meeting
        places = meeting.ask(self._sockets.stopped)
        blocks = cut(flat_state(self._engine))
        with ThreadPoolExecutor(meeting.streams, thread_name_prefix="heal-target") as pool:
            streams = [
                pool.submit(
                    self._receive,
                    number,
                    places[number % len(places)],
                    blocks[number :: meeting.streams],
                )
                for number in range(meeting.streams)
            ]
            try:
                facts, *_ = [stream.result() for stream in as_completed(streams)]
                return facts
            except Exception:
                self._sockets.stop()
                raise

    def _receive(self, number: int, place: Place, blocks: Sequence[Block]) -> Facts:
        """What comes over one stream, from the source at `place`."""
        host, port = place
        try:
            with self._sockets.holding(socket.socket(family_of(host))) as connection:
                connection.settimeout(self._meeting.rendezvous.timeout_s)
                connection.connect(place)
                facts = enter(connection, self._meeting, Stream(self._number, number))
                if facts.state_bytes != self.bytes:
                    raise HealError(
                        f"the source has {facts.state_bytes:,} bytes of state, this worker "
                        f"{self.bytes:,}"
                    )
                self._receive_blocks(connection, number, blocks)
                return facts
        except OSError as error:
            raise HealError(
                f"the connection to the source at {host}:{port} failed: {error}"
            ) from error

    def _receive_blocks(
        self, connection: socket.socket, number: int, blocks: Sequence[Block]
    ) -> None:
        size_bytes = max((block.size_bytes for block in blocks), default=0)
        staged = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        for block in blocks:
            data = staged[: block.size_bytes]
            receive_block(connection, block.position, data.numpy().data)
            if self._sockets.stopped():
                raise GroupError(LEFT)
            self._place(block, data)
            self._received[number] += block.size_bytes

    def _place(self, block: Block, data: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):  # nothing on a CPU
            parts = data.split([view.numel() for view in block.views])
            for view, part in zip(block.views, parts, strict=True):
                view.copy_(part, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _accept(self, facts: Facts) -> None:
        with self._concluding:
            if self._sockets.stopped():
                raise GroupError(LEFT)
            self._engine.forget_initial_weights()
            self._engine.state.optimizer_steps = facts.optimizer_steps
            self.skipped_in_a_row = facts.skipped_in_a_row
            self._arrived = True
