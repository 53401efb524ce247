"""What a worker builds beside the steps, on a thread: its part of the replica that is to be whole
again, while it follows the others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.protocol.messages import Build
from trainer.backend.groups import leave_replica_group
from trainer.backend.origin import Origin, origin_of
from trainer.engine.engine import Engine
from trainer.errors import describe


class SideBuild:
    """One such part.

    Args:
        answer: what is to be built.
        build: makes the engine, and leaves off when what it is given becomes true.
        done: called by the thread when the engine is there.
        failed: called by the thread with what there is to say of the exception that it ended with,
            and the exception's origin.
    """

    def __init__(
        self,
        answer: Build,
        build: Callable[[Callable[[], bool]], Engine],
        done: Callable[[], None],
        failed: Callable[[str, Origin], None],
    ) -> None:
        self.answer = answer
        self.engine: Engine | None = None
        """The engine, once it is there."""
        self._build, self._done, self._failed = build, done, failed
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="side-build", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives it up, and its process group."""
        self._given_up.set()
        self._thread.join()
        self.engine = None
        leave_replica_group()

    def _run(self) -> None:
        failure = self._try()
        if failure is None:
            self._done()
            return
        leave_replica_group()  # no frame holds it any more
        if not self._given_up.is_set():
            self._failed(*failure)

    def _try(self) -> tuple[str, Origin] | None:
        try:
            self.engine = self._build(self._given_up.is_set)
        except BaseException as error:  # as in the build of a worker that waits for it
            return describe(error), origin_of(error)
        return None
