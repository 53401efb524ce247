"""Work that the run does not depend on: on threads of its own, and its failures end no run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from elastic.coordinator.dispatcher import Dispatcher
from elastic.membership.machine import Membership

log = logging.getLogger(__name__)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Aside:
    """Where such work is done. To be used on the event loop.

    Args:
        membership: knows whether the run is over.
        dispatcher: does the work in the background.
        threads: calls at once, of those that may take long. Others of the coordinator do not wait
            behind them.
    """

    def __init__(self, membership: Membership, dispatcher: Dispatcher, threads: int = 4) -> None:
        self._membership, self._dispatcher = membership, dispatcher
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="aside")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work` in the background, once a coordinator that was started anew knows the run:
        before, nobody has a place, and no machine a worker. A failure is logged; it does not end
        the run."""
        self._dispatcher.spawn(self._when_known(work))

    async def _when_known(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await self._dispatcher.ready.wait()
            await work
        except Exception:  # the dispatcher would end the run for it
            log.exception("what is done aside has failed")
        finally:
            work.close()  # it has not begun where the coordinator ends before the run is known

    def on_thread(
        self, function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> asyncio.Future[_Result]:
        """What `function` returns."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, partial(function, *args, **kwargs))

    async def goes_on_for(self, seconds: float) -> bool:
        """Waits. Returns at once, and False, where the run is over."""
        await self._dispatcher.until(lambda: self._membership.stopped is not None, seconds)
        return self._membership.stopped is None
