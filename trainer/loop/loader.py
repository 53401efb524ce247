"""Micro-batches, read ahead of the step that takes them.

    reader thread   next ids ── read ── pin (CUDA) ──► queue, `ahead` deep
    the step        take() ──────────────────────────────► batch; one more is asked for

One thread of the process reads, whatever there is to read: what a user's dataset holds need not be
made for several threads, nor may it be opened in one and used in another. Nothing is saved of a
loader: what it reads is a function of (seed, step). A generation makes a new one, as its lanes may
be others.

A dataset that draws from torch's generator gets the numbers that the micro-batch was seeded with.
The generator is one for all threads, so such a read waits until it is due, and so does one that
seeds or saves it (`draws.py`). Decision: docs/decisions/042.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.data import SampleSource
from trainer.data.batches import pinned
from trainer.data.order import Ids
from trainer.loop.draws import DrawnError, Draws
from trainer.loop.faltering import read_patiently

log = logging.getLogger(__name__)

_READER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")


def read(data: SampleSource, ids: Ids, seed: Callable[[], object] = bool) -> Any:
    """The samples `ids` as one batch, now. Waits for what is being read.

    Args:
        data: of which.
        ids: which.
        seed: seeds the generators as they are now; a read that failed may have drawn.

    Raises:
        DataStorageError: see `read_patiently`.
        Exception: what else the dataset raised.
    """
    return read_patiently(lambda: _READER.submit(data.batch, ids).result(), seed)


class _Read(NamedTuple):
    """A micro-batch."""

    ids: Ids
    batch: Any
    read_s: float
    complete: bool
    """Else it is read when it is due: not begun, or it draws, or could not be read without."""


class Loader:
    """The micro-batches of one worker in one generation, in the order that they are due.

    Args:
        data: the samples.
        due: ids of each micro-batch, asked for in the reader's thread.
        ahead: most micro-batches read and not taken; 0: each is read when it is asked for.
        pin: put them in memory that a GPU copies from by itself.
    """

    def __init__(self, data: SampleSource, due: Iterator[Ids], *, ahead: int, pin: bool) -> None:
        self._data, self._due, self._ahead, self._pin = data, due, ahead, pin
        self.read_s = 0.0
        """How long the dataset took for the micro-batch that was taken last, waited for or not."""
        self._reads: deque[Future[_Read]] = deque()

    def take(self, seed: Callable[[], object] = bool) -> tuple[Ids, Any]:
        """The next micro-batch: its ids, and its samples on the CPU.

        Args:
            seed: seeds the generators as they are now; a read that failed may have drawn.

        Raises:
            DataStorageError: see `read_patiently`.
            Exception: what else the dataset raised.
        """
        if not self._reads:
            self._reads.append(_READER.submit(self._deal))
        taken = self._reads.popleft().result()
        if not taken.complete:
            ids = taken.ids
            taken = read_patiently(lambda: _READER.submit(self._read_due, ids).result(), seed)
        self.read_s = taken.read_s
        while len(self._reads) < self._ahead:
            self._reads.append(_READER.submit(self._read_ahead))
        return taken.ids, taken.batch

    def close(self) -> None:
        """Gives up what was not taken. A read that is under way ends by itself; nobody waits."""
        while self._reads:
            self._reads.popleft().cancel()
        self._due = iter(())  # what deals the ids holds the step, and so memory of the device

    def _deal(self) -> _Read:
        return _Read(next(self._due), None, 0.0, complete=False)

    def _read_due(self, ids: Ids) -> _Read:
        """Reads while the step waits, so that nobody else draws."""
        before = torch.get_rng_state()
        with Draws(refused=False) as draws:
            read = self._read(ids)
        # It may also seed that generator, for others to draw from, and may leave it as it was.
        if draws.asked or not torch.equal(before, torch.get_rng_state()):
            self._ahead = 0
        return read

    def _read_ahead(self) -> _Read:
        ids = next(self._due, None)
        if ids is None:  # the run ends before
            return _Read(np.empty(0, dtype=np.int64), None, 0.0, complete=True)
        read = _Read(ids, None, 0.0, complete=False)
        draws = Draws(refused=True)
        try:
            with draws:
                read = self._read(ids)
        except (Exception, DrawnError) as error:  # what it was comes again when it is due
            if isinstance(error, Exception):
                log.warning("a micro-batch is read again when it is due: %r", error)
        if draws.asked:
            self._ahead = 0
            return read._replace(complete=False)
        return read

    def _read(self, ids: Ids) -> _Read:
        began_s = time.perf_counter()
        batch = self._data.batch(ids)
        read_s = time.perf_counter() - began_s
        return _Read(ids, pinned(batch) if self._pin else batch, read_s, complete=True)
