"""What workers wrote last, kept where it may soon be gone.

    a worker is lost ──► incidents/N/: the end of its output, the readings of its node
    a machine is about to be replaced ┐
    it is announced to go, and again  ├─► logs/NODE/: the output of all workers that were there
    when the run has left it          ┘

It is asked for when the loss has been settled, and nobody waits for it but, for so long, the end of
the run and the machine's replacement: a disk or a storage that hangs delays no verdict, no beat and
no regroup, and takes no more than one thread of those aside, and one of an agent's. Of a node that
is gone nothing comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from elastic.coordinator.agents import NodeAgents
from elastic.coordinator.aside import Aside
from elastic.coordinator.evidence import LESSER_SHARE, has_room, keep_evidence
from elastic.coordinator.run_log import RunLog
from elastic.protocol import events
from elastic.protocol.causes import COLLECTIVE, Cause, entry_of
from elastic.protocol.messages import Death
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from elastic.reporting.outputs import KINDS, find_outputs, keep_files

log = logging.getLogger(__name__)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

FINISH_S = 5.0
"""How long the end of a run waits for what is being kept."""
OUTPUT_S = 30.0
"""How long a machine's replacement waits for it, and whoever is announced to go after another."""
LEAVE_S = 1.0
"""How often it is looked at whether the run has left a machine that will go."""

_FILE_BYTES, _NODE_BYTES = 256 << 10, 8 << 20
"""Kept of a worker's file, and of all those of a node, before its machine is replaced."""
_AT_ONCE = 16
"""Workers in one folder."""


class LastWords:
    """One for the run; it runs on the coordinator's event loop.

    Args:
        paths: where it is kept.
        agents: asked for it.
        records: tell who joins, and who is lost.
        aside: where it is written.
    """

    def __init__(self, paths: RunPaths, agents: NodeAgents, records: RunLog, aside: Aside) -> None:
        self._paths, self._agents, self._aside = paths, agents, aside
        self._joined: dict[str, events.WorkerJoined] = {}
        """Workers that were not lost."""
        self._frozen: set[str] = set()
        """Those of them that their agents have killed."""
        self._lost: list[tuple[events.WorkerJoined, events.WorkerLost]] = []
        """Workers whose words nobody has been asked for yet."""
        self._announced = asyncio.Lock()
        """One after the other: many machines may be announced to go at once."""
        self._storing: asyncio.Future[Any] | None = None
        """What was begun last on the storage."""
        self._done = asyncio.Event()
        self._done.set()
        records.followers.append(self._hear)

    def replay(self, happened: Iterable[events.Event]) -> None:
        """Told of what has happened in this start of the run, by a coordinator started anew."""
        for event in happened:
            self._take(event)

    def expect_of_frozen(self, deaths: Iterable[Death]) -> None:
        """Asks for the words of those whom their agents have killed, too, once they are lost: the
        thread that kills looked at their stacks alone."""
        killed = {death.worker for death in deaths if death.evidence is not None}
        self._frozen |= killed & self._joined.keys()  # a death may be told again after the loss

    async def finish(self) -> None:
        """Waits until what is being kept of those who were lost is kept, `FINISH_S` at most."""
        try:
            await asyncio.wait_for(self._done.wait(), FINISH_S)
        except asyncio.TimeoutError:
            log.warning("the last words of workers are not kept after %g s", FINISH_S)

    async def keep_output(self, node: str) -> None:
        """Keeps what all workers of the run wrote on a node, `OUTPUT_S` at most: its machine will
        be replaced, with them or without."""
        try:
            await asyncio.wait_for(self._keep_output(node), OUTPUT_S)
        except Exception as error:  # such as that of a storage that is full
            log.warning("what workers wrote last on node %s is not kept: %r", node, error)

    def keep_announced(self, node: str, works_on: Callable[[str], bool]) -> None:
        """Keeps, in the background, what all workers of the run wrote on a node that is announced
        to go: at once, as nobody knows how long it lasts, and again when the run has left it.

        Args:
            node: by Ray's id.
            works_on: whether the run would miss a worker on a node.
        """
        self._aside.spawn(self._keep_announced(node, works_on))

    async def _keep_announced(self, node: str, works_on: Callable[[str], bool]) -> None:
        async with self._announced:
            await self.keep_output(node)
        while works_on(node):
            if not await self._aside.goes_on_for(LEAVE_S):
                return
        async with self._announced:
            await self.keep_output(node)

    async def _keep_output(self, node: str) -> None:
        happened = await self._on_storage(
            read_events, self._paths.events, kinds=KINDS, lenient=True
        )
        files = [n for one in find_outputs(happened) if one.node == node for n in one.files]
        if not files:
            return
        most_bytes = min(_FILE_BYTES, _NODE_BYTES // len(files))
        texts = await self._agents.output(node, files, most_bytes)
        if not texts:
            log.warning(
                "what workers wrote last on node %s is not kept: no agent there reads it", node
            )
            return
        await self._on_storage(keep_files, self._paths.output_of(node), texts)

    def _hear(self, event: events.Event) -> None:
        lost = self._take(event)
        if lost is None:
            return
        frozen = lost[1].worker in self._frozen
        self._frozen.discard(lost[1].worker)
        if frozen or _has_words(lost[1].cause):
            self._lost.append(lost)
            if self._done.is_set():
                self._done.clear()
                self._aside.spawn(self._keep_all())

    def _take(self, event: events.Event) -> tuple[events.WorkerJoined, events.WorkerLost] | None:
        """Takes in who joins and who is lost; returns one who had joined and is lost now."""
        if isinstance(event, events.WorkerJoined):
            self._joined[event.worker] = event
        elif isinstance(event, events.WorkerLost):
            joined = self._joined.pop(event.worker, None)
            return None if joined is None else (joined, event)
        return None

    async def _keep_all(self) -> None:
        try:
            while self._lost:
                lost, self._lost = self._lost[:_AT_ONCE], self._lost[_AT_ONCE:]
                await self._keep(lost)
        finally:
            self._done.set()

    async def _keep(self, lost: Sequence[tuple[events.WorkerJoined, events.WorkerLost]]) -> None:
        if not await self._on_storage(has_room, self._paths.incidents, LESSER_SHARE):
            return
        found = await self._agents.last_words(joined for joined, _ in lost)
        if not found:
            return
        accused = {event.worker: f"{event.cause}: {event.detail}" for _, event in lost}
        await self._on_storage(
            keep_evidence, self._paths.incidents, accused, found, share=LESSER_SHARE
        )

    async def _on_storage(
        self, function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Result:
        """As `Aside.on_thread`, one after the other: of a storage that hangs one thread is enough,
        however often it is asked, as for each try to replace a machine."""
        while self._storing is not None and not self._storing.done():
            await asyncio.wait([self._storing])
        answer = self._aside.on_thread(function, *args, **kwargs)
        self._storing = answer
        return await asyncio.shield(answer)


def _has_words(cause: Cause) -> bool:
    """Whether nothing was kept so far of a worker that is lost for it: who was ended for standing
    still was looked at before, and who was announced to go has gone."""
    return cause == COLLECTIVE or entry_of(cause).budget == "max_crashes"
