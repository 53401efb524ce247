"""Micro-batches, read ahead of the step that takes them.

    reader thread   next ids ── read ── pin (CUDA) ──► queue, `ahead` deep
    the step        take() ──────────────────────────────► batch; one more is asked for

One thread of the process reads, whatever there is to read: what a user's dataset holds need not be
made for several threads, nor may it be opened in one and used in another. Nothing is saved of a
loader: what it reads is a function of (seed, step). A generation makes a new one, as its lanes may
be others. Decision: docs/decisions/042.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from trainer.data import SampleSource
from trainer.data.order import Ids
from trainer.engine.batches import pinned

_READER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")


def read(data: SampleSource, ids: Ids) -> Any:
    """The samples `ids` as one batch, now. Waits for what is being read."""
    return _READER.submit(data.batch, ids).result()


class Loader:
    """The micro-batches of one worker in one generation, in the order that they are due.

    A dataset that draws from torch's generator gets the numbers that the micro-batch was seeded
    with: it is read when it is asked for, since the generator is one for all threads. The first
    micro-batch shows it.

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
        self._reads: deque[Future[tuple[Ids, Any, float]]] = deque()
        self._tried = False

    def take(self) -> tuple[Ids, Any]:
        """The next micro-batch: its ids, and its samples on the CPU.

        Raises:
            Exception: what the dataset raised.
        """
        self._ask_for(1)
        ids, batch, self.read_s = self._reads.popleft().result()
        self._ask_for(self._ahead)
        return ids, batch

    def close(self) -> None:
        """Gives up what was not taken. A read that is under way ends by itself; nobody waits."""
        while self._reads:
            self._reads.popleft().cancel()

    def _ask_for(self, count: int) -> None:
        while len(self._reads) < count:
            self._reads.append(_READER.submit(self._read if self._tried else self._read_first))
            self._tried = True

    def _read(self) -> tuple[Ids, Any, float]:
        ids = next(self._due, None)
        if ids is None:  # the run ends before
            return np.empty(0, dtype=np.int64), None, 0.0
        began_s = time.perf_counter()
        batch = self._data.batch(ids)
        read_s = time.perf_counter() - began_s
        return ids, pinned(batch) if self._pin else batch, read_s

    def _read_first(self) -> tuple[Ids, Any, float]:
        before = torch.get_rng_state()
        taken = self._read()
        if not torch.equal(before, torch.get_rng_state()):
            self._ahead = 0
        return taken
