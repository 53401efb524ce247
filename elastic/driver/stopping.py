"""Ctrl-C and SIGTERM to the driver: the first lets the run end well, the second at once."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

import ray

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote
from elastic.ray_compat.kept import keep_stop

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """What the two signals mean while a run goes on: for as long as the `with` block lasts, in the
    main thread. In another thread they mean what they meant before.

    The first one has the coordinator end the run after the step that is under way, with a
    checkpoint; the block goes on meanwhile. The second one is raised in the block.

    Args:
        coordinator: the run's coordinator actor.
        prefix: of the run's names.
    """

    def __init__(self, coordinator: Remote[CoordinatorApi], prefix: str) -> None:
        self._coordinator, self._prefix = coordinator, prefix
        self._before: dict[int, Any] = {}
        self._number: int | None = None

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._number is not None

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._take) for n in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def settle(self) -> None:
        """The run has ended as asked, and all is written down. Called after the block; returns
        where no signal has come, or where SIGTERM is ignored.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            SystemExit: it was SIGTERM, and Ray had taken it: Ray's own handlers end the process
                with 15 or 1, as no shell does. Else it does what it would have done without us.
        """
        if self._number == signal.SIGINT:  # also where a shell has had it ignored
            raise KeyboardInterrupt
        if self._number is None:
            return
        if _is_rays(signal.getsignal(self._number)):
            sys.exit(128 + self._number)
        signal.raise_signal(self._number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(128 + number)
        self._number = number
        # A handler must not wait, and what it interrupted may hold any lock.
        threading.Thread(target=self._tell, name="stop", daemon=True).start()

    def _tell(self) -> None:
        name = signal.Signals(self._number or 0).name
        log.warning(
            "%s: the run saves and stops after this step, and where none has begun once its "
            "workers have started; again: it stops at once",
            name,
        )
        # First, as it needs no head of Ray. But nobody may take it before `ray job stop` kills this
        # process, and then it is lost: the next coordinator finds what is kept.
        self._coordinator.send(CoordinatorApi.wind_down, name)
        try:
            keep_stop(self._prefix, name)
        except Exception as error:
            log.warning("a coordinator that is started anew will not know of it: %s", error)
        try:
            self._coordinator.call(CoordinatorApi.wind_down, name)
        except ray.exceptions.RayError as error:
            log.warning("the run was not told to stop: %s", error)


def _is_rays(handler: Any) -> bool:
    """Whether Ray has set it: `ray.init` does, and again where it starts a cluster."""
    return str(getattr(handler, "__module__", None)).startswith("ray.")
