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
        show: called by the thread with whether it is at work: it may hold the interpreter's lock
            for long.
        after: one that was given up, and may still be building: the thread waits until nothing is
            left of it.
    """

    def __init__(
        self,
        answer: Build,
        build: Callable[[Callable[[], bool]], Engine],
        done: Callable[[], None],
        failed: Callable[[str, Origin], None],
        show: Callable[[bool], None],
        after: SideBuild | None = None,
    ) -> None:
        self.answer = answer
        self.engine: Engine | None = None
        """The engine, once it is there."""
        self._build, self._done, self._failed = build, done, failed
        self._show, self._after = show, after
        self._given_up, self._kept = threading.Event(), False
        self._deciding = threading.Lock()
        """Held while it is decided who lets go of the engine: the thread, or, once it is `_kept`,
        whoever gives it up."""
        self._thread = threading.Thread(target=self._run, name="side-build", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Its thread leaves off as soon as it can, and lets go of what there is then; nobody's step
        waits for that."""
        with self._deciding:
            self._given_up.set()
            kept, self._kept = self._kept, False
        if kept:  # the thread may have ended, or wait for the coordinator
            self._let_go()

    def close(self) -> None:
        """Gives it up, and waits until nothing of it is left: as long as what it builds takes."""
        self.give_up()
        self._thread.join()

    def _keep(self) -> bool:
        """Whether what was built is still wanted."""
        with self._deciding:
            self._kept = not self._given_up.is_set()
            return self._kept

    def _let_go(self) -> None:
        self.engine = None
        leave_replica_group()

    def _run(self) -> None:
        try:
            failure = self._try()
            if failure is None and self._keep():
                self._done()
                return
            self._let_go()  # no frame holds the group any more
            if failure is not None and not self._given_up.is_set():
                self._failed(*failure)
        finally:
            self._show(False)

    def _try(self) -> tuple[str, Origin] | None:
        try:
            if self._after is not None:  # first: a worker is in one replica's group at a time
                self._after.close()
                self._after = None
            self._show(True)  # not before: the other's thread shows that it has ended
            self.engine = self._build(self._given_up.is_set)
        except BaseException as error:  # as in the build of a worker that waits for it
            return describe(error), origin_of(error)
        return None
