"""Carries out what membership decides: answers those who wait in `join`, calls those in `watch`.

Everything here runs on the coordinator's one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from elastic.coordinator.run_log import RunLog
from elastic.membership.decisions import Effects
from elastic.membership.machine import Membership
from elastic.protocol.causes import Cause
from elastic.protocol.messages import Answer, Report, Signal, Stop

log = logging.getLogger(__name__)

_WRITTEN_OFF = Signal(serial=2**62, kind="fault", broken=True)
"""To who was written off and lives: its last signal, above all that it may have heard. It is one
for all, so that of each loss of a long run nothing is kept."""

_NO_GC_S = 3.0
"""A regroup is over by then, or waits for machines."""


class Dispatcher:
    """Answers, calls and wakes the workers, as membership decides.

    Args:
        membership: decides.
        records: where it is written down.
        also: what else follows from a decision, apart from answers, calls and records.
    """

    def __init__(
        self, membership: Membership, records: RunLog, also: Callable[[Effects], None]
    ) -> None:
        self._membership, self._records, self._also = membership, records, also
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self.signals: dict[str, Signal] = {}
        """The last one to each worker that was not lost."""
        self._bells: dict[str, asyncio.Future[None]] = {}
        """Worker -> what wakes its call of `watch`; each its own, for there are thousands."""
        self._collecting: asyncio.TimerHandle | None = None
        self._deciding = False
        """Somebody has joined, and it is about to be decided what follows."""
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ready = asyncio.Event()
        """Set but while a coordinator that was started anew asks the workers where they stand."""

    # -- workers that wait -------------------------------------------------------------------------

    async def join(self, report: Report) -> Answer:
        """Takes a worker's report, and waits for the answer to it."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[report.identity.worker] = answer
        self._records.arrives(report.identity.worker)
        self._membership.join(report)
        if not self._deciding:
            self._deciding = True
            self.spawn(self._decide_for_all())
        return await answer

    async def _decide_for_all(self) -> None:
        """One decision serves all who arrive in the same turn of the event loop: thousands, in a
        regroup."""
        self._deciding = False
        await self.advance()

    async def watch(self, worker: str, seen: int) -> Signal | None:
        """Waits for a call to `worker` later than signal `seen`; None when the run is over."""
        while True:
            lost = worker in self._membership.lost
            signal = _WRITTEN_OFF if lost else self.signals.get(worker)
            if signal is not None and signal.serial > seen:
                return signal
            if self._membership.stopped is not None:
                return None
            bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            await self._bells.setdefault(worker, bell)

    def turn_away(self, worker: str) -> None:
        """A worker was written off, and membership knows. Should it live, it must know, too: it is
        answered where it waits, and called where it works, for nothing of its replica may break."""
        self._answer(worker, Stop(error="this worker was written off; it is replaced"))
        self.signals.pop(worker, None)
        self._ring(worker)

    def _answer(self, worker: str, answer: Answer) -> None:
        future = self._answers.pop(worker, None)
        if future is not None and not future.done():
            future.set_result(answer)

    # -- decisions ---------------------------------------------------------------------------------

    async def advance(self) -> None:
        """Has membership decide, and carries it out."""
        membership = self._membership
        effects = self._decide()
        if effects.called is not None:
            self._put_off_gc()
        self.signals.update(effects.signals)
        for worker, answer in effects.answers.items():
            self._answer(worker, answer)
        self._also(effects)
        going_on = membership.stopped is None
        self._records.write_down(effects)
        over = membership.stopped is not None
        if going_on and over:  # it could not be written down
            await self.advance()
        for worker in list(self._bells) if over else effects.signals:
            self._ring(worker)
        if over:
            await self.tell()

    def _ring(self, worker: str) -> None:
        bell = self._bells.pop(worker, None)
        if bell is not None and not bell.done():
            bell.set_result(None)

    def _put_off_gc(self) -> None:
        """Of the many calls and answers that a regroup makes, none is garbage until it is over."""
        gc.disable()
        if self._collecting is not None:
            self._collecting.cancel()
        self._collecting = asyncio.get_running_loop().call_later(_NO_GC_S, gc.enable)

    def _decide(self) -> Effects:
        try:
            return self._membership.advance()
        except Exception:
            # A bug here must end the run with its traceback, not leave everybody waiting.
            error = f"the coordinator failed:\n{traceback.format_exc()}"
            self._membership.stop(error)
            return self._membership.advance()

    async def stop(self, error: str, cause: Cause | None = None) -> None:
        """Ends the run with an error; see `Stop` for `cause`."""
        if self._membership.stopped is None:
            self._membership.stop(error, cause)
            await self.advance()

    # -- news --------------------------------------------------------------------------------------

    async def tell(self) -> None:
        """A worker was lost, the run has ended, an injected fault has hit: those who wait in
        `until` look again."""
        async with self._news:
            self._news.notify_all()

    async def until(self, happened: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Waits until `happened` is true, or for so long."""
        async with self._news:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait_for(happened), timeout_s)

    # -- work in the background --------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Does `work` in the background. A failure there ends the run with its traceback, and does
        not go unseen."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the coordinator failed", exc_info=task.exception())
            detail = "".join(traceback.format_exception(task.exception()))
            self.ready.set()
            self.spawn(self.stop(f"the coordinator failed:\n{detail}"))
