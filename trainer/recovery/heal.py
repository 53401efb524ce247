"""Heal: the copy of model and optimizer state into a replica that has none, while the others train.

    source     copies its state at a step boundary, in a thread, and sends the copy in chunks
    newcomer   takes part in every reduce with no lanes, keeps the summed gradients, receives the
               state in a thread, and applies the kept steps in order: it has caught up

Nobody waits for anybody: the source's step waits for the copy alone, which is made while forward
and backward compute. Each (shard, tensor) heals from the same one of a healthy replica, in parallel
and over a group of its own. Each transfer carries a checksum. A heal that is so slow that the host
cannot keep the steps meanwhile has failed, and begins again. Design:
docs/decisions/012-heal-without-stalling.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from checkpointing.format.crc32 import crc32
from trainer.backend.polling import LEFT
from trainer.engine.engine import Engine
from trainer.errors import GroupError
from trainer.recovery.backlog import Backlog
from trainer.recovery.heal_channel import HealChannel
from trainer.replication.step_commit import Commit

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
"""Large enough for the network's full speed, small enough to leave soon."""

_CATCH_UP_SHARE = 0.5
"""Of a step's time that a newcomer applies kept steps in: its peers wait for it in the reduce."""


class Source:
    """A healthy worker's part. Its thread ends by itself; `close` when leaving the generation.

    Args:
        engine: the state, at a step boundary now.
        skipped_in_a_row: of its progress.
        channel: to its newcomers.
    """

    def __init__(self, engine: Engine, skipped_in_a_row: int, channel: HealChannel) -> None:
        # The thread gets tensors and not the engine, which it would keep alive.
        self._parts, self._device = _flat_state(engine), engine.device
        self._numbers = engine.state.optimizer_steps, skipped_in_a_row
        self._channel, self._copied = channel, threading.Event()
        self._stream = _beside_the_current(self._device)
        threading.Thread(target=self._run, name="heal-source", daemon=True).start()

    def await_copy(self) -> None:
        """Called before the state changes."""
        self._copied.wait()

    def close(self) -> None:
        """Ends the sending."""
        self._channel.stop()

    def _run(self) -> None:
        try:
            try:
                staged = self._copy()
            finally:
                self._parts = []
                self._copied.set()
            self._channel.open()
            with torch.cuda.stream(self._stream):  # nothing on a CPU
                self._send(staged)
        except Exception as error:
            log.warning("a heal was not completed: %s", error)
        finally:
            self._channel.close()

    def _copy(self) -> torch.Tensor:
        """On CUDA beside what the device computes, on a stream of its own."""
        count = sum(part.numel() for part in self._parts)
        staged = torch.empty(count, dtype=torch.uint8, pin_memory=self._stream is not None)
        with torch.cuda.stream(self._stream):
            places = staged.split([part.numel() for part in self._parts])
            for place, part in zip(places, self._parts, strict=True):
                place.copy_(part, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return staged

    def _send(self, staged: torch.Tensor) -> None:
        crc = 0
        for chunk in staged.split(CHUNK_BYTES):
            crc = crc32(chunk.numpy().data, crc)
            self._channel.send(chunk.to(self._device))
        trailer = torch.tensor([0, *self._numbers], dtype=torch.int64)
        trailer[0] = crc32(trailer[1:].numpy().data, crc)
        self._channel.send(trailer.to(self._device))


class Newcomer:
    """A worker without state: what it receives, and the steps committed meanwhile.

    Args:
        engine: gets the state.
        channel: from the source.
        clip_norm: of the optimizer.
        backlog: where the steps are kept.
    """

    def __init__(
        self, engine: Engine, channel: HealChannel, clip_norm: float, backlog: Backlog | None = None
    ) -> None:
        self._engine, self._channel, self._clip_norm = engine, channel, clip_norm
        self._backlog = Backlog() if backlog is None else backlog
        self._placing = threading.Lock()
        self._closed = self._arrived = False
        self._kept_at, self._step_s = time.monotonic(), 0.0
        self.skipped_in_a_row = 0
        """Of the state, up to the last step applied."""
        self.started_at = time.monotonic()
        self.bytes = sum(part.numel() for part in _flat_state(engine))
        """Of state to receive, each once."""
        self.steps_behind = 0
        """The most steps that it had to make up for."""
        self._received = 0
        self._failure: str | None = None
        self._failed = False
        engine.state.await_copy()  # of a save before this worker lost its state
        self._stream = _beside_the_current(engine.device)
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
        if no_room is not None:
            self._apply_oldest()
        self.steps_behind = max(self.steps_behind, len(self._backlog))
        now = time.monotonic()
        self._kept_at, self._step_s = now, now - self._kept_at

    def catch_up(self) -> None:
        """Applies kept steps for a while. Called before the reduce, in which the others still
        compute."""
        if not self._arrived or not self._backlog:
            return
        until = time.monotonic() + _CATCH_UP_SHARE * self._step_s
        while self._backlog:
            self._apply_oldest()
            if time.monotonic() > until:
                break

    def finish(self) -> bool:
        """Called when leaving the generation, after `close`: where the state has arrived, applies
        all kept steps, for the source may be gone and this the last copy. Returns whether the state
        is that of the last committed step.

        The engine's gradient stays: it may be that of a step that others saw committed.
        """
        if self._arrived and self._backlog:
            gradient = self._engine.gradient.clone()
            while self._backlog:
                self._apply_oldest()
            self._engine.gradient.copy_(gradient)
        return self._arrived

    def _apply_oldest(self) -> None:
        commit, gradient = self._backlog.take_oldest()
        self._engine.gradient.copy_(gradient)
        if commit.finite:
            self._engine.apply(commit.step, scale=commit.scale(self._clip_norm))
        self.skipped_in_a_row = 0 if commit.finite else self.skipped_in_a_row + 1

    def close(self) -> None:
        """Ends the receiving, and waits for it, one chunk at most: the thread keeps the engine
        alive, and with it the sockets by whose end the peers of its replica notice."""
        with self._placing:
            self._closed = True
        self._channel.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._channel.open()
            with torch.cuda.stream(self._stream):  # nothing on a CPU
                self._receive()
        except Exception as error:
            self._fail(str(error))
        finally:
            self._channel.close()

    def _fail(self, reason: str) -> bool:
        """The state will not arrive; the first reason counts. Returns False where it just has."""
        with self._placing:
            if self._arrived:
                return False
            if not self._failed:
                self._failure = reason
            self._failed = self._closed = True
        self._channel.stop()
        self._backlog.clear()
        return True

    def _too_slow(self, no_room: str) -> str:
        seconds = time.monotonic() - self.started_at
        return (
            f"the state comes too slowly: {self._received:,} of {self.bytes:,} bytes in "
            f"{seconds:.1f} s. Meanwhile {no_room}. Use hosts with more memory, fewer workers on "
            f"each, or a faster network"
        )

    def _receive(self) -> None:
        state, crc = _flat_state(self._engine), 0
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=self._engine.device)
        for start in range(0, self.bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, self.bytes - start)]
            self._channel.send(chunk)
            crc = crc32(chunk.cpu().numpy().data, crc)
            with self._while_open():
                for target, part in _overlaps(state, start, chunk):
                    target.copy_(part)
            self._received = start + chunk.numel()
        trailer = torch.empty(3, dtype=torch.int64, device=self._engine.device)
        self._channel.send(trailer)
        self._accept(trailer.cpu(), crc)

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """The thread writes to the engine in here: `close` waits for it. Raises GroupError after
        `close`."""
        with self._placing:
            if self._closed:
                raise GroupError(LEFT)
            yield

    def _accept(self, trailer: torch.Tensor, crc: int) -> None:
        crc = crc32(trailer[1:].numpy().data, crc)
        sent_crc, optimizer_steps, skipped = trailer.tolist()
        if crc != sent_crc:
            raise RuntimeError(f"the state's CRC-32 is {crc:08x}, its source sent {sent_crc:08x}")
        if self._stream is not None:
            self._stream.synchronize()
        with self._while_open():
            self._engine.forget_initial_weights()
            self._engine.state.optimizer_steps = optimizer_steps
            self.skipped_in_a_row = skipped
            self._arrived = True


def _beside_the_current(device: torch.device) -> torch.cuda.Stream | None:
    """On CUDA a stream for a heal's thread, after what is queued now: on the current one it would
    wait for all that the training queues. None on a CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _flat_state(engine: Engine) -> list[torch.Tensor]:
    """The state as flat views of bytes, in the order that every replica has."""
    return [tensor.view(-1).view(torch.uint8) for tensor in engine.state.tensors().values()]


def _overlaps(
    state: list[torch.Tensor], start: int, chunk: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(part of the state, the same part of `chunk`), for a chunk that begins at byte `start`."""
    end, begin = start + chunk.numel(), 0
    for part in state:
        low, high = max(begin, start), min(begin + part.numel(), end)
        if low < high:
            yield part[low - begin : high - begin], chunk[low - start : high - start]
        begin += part.numel()
