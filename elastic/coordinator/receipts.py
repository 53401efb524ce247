"""The coordinator's part in checkpoints: the last receipt of one commits it (`publisher.py`)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from checkpointing import Keys, Receipt, give_up, open_store
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.publisher import Publisher
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.save_wish import SaveWish
from elastic.membership.machine import Membership
from elastic.protocol import events

_DELETING_S = 60.0
"""The last writer waits so long for old checkpoints to be deleted, and with it the run's end."""


class Receipts:
    """Takes the receipts of saves and says what became of each checkpoint.

    Args:
        config: where checkpoints go, and how many are kept.
        membership: told of what is committed.
        dispatcher: carries out what follows.
        records: where it is written down.
        save_wish: told where one fails.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        membership: Membership,
        dispatcher: Dispatcher,
        records: RunLog,
        save_wish: SaveWish,
    ) -> None:
        self._membership = membership
        self._dispatcher, self._records, self._save_wish = dispatcher, records, save_wish
        self._paths, self._undeleted_told = config.paths, False
        self._failed = set[tuple[int, int]]()
        """Step and generation of saves that could not be written or committed."""
        self._publisher = Publisher(
            config.paths,
            config.checkpoint,
            versions=config.started.versions,
            newest=config.restore_step,
        )

    def saved(self, step: int) -> bool:
        """Whether a checkpoint of `step` is committed."""
        return self._publisher.saved(step)

    async def newest(self) -> tuple[int, int] | None:
        """See `Publisher.newest`."""
        return await self._publisher.newest()

    def replay(self, committed: frozenset[int]) -> None:
        """Of a coordinator that was started anew: checkpoints that are in the records."""
        self._publisher.replay(committed, self._membership.progress.recorded)

    def keep(self, step: int, *, by: str) -> None:
        """The newest checkpoint of `step` or before stays: somebody may have to go back to it, and
        says so again as the run goes on."""
        self._publisher.needed[by] = step

    def forget(self, step: int) -> None:
        """The checkpoint of `step` was set aside: another one may be committed."""
        self._publisher.forget(step)

    def forget_after(self, step: int) -> None:
        """The run goes back to `step`: see `Publisher.forget_after`."""
        self._publisher.forget_after(step)

    async def take(
        self, receipt: Receipt, training_state: dict[str, Any], started: float, writers: int
    ) -> None:
        """A part of a checkpoint is written; the last one's receipt commits it.

        After a restore the records lack the steps that were lost. A late checkpoint of those steps,
        by a worker that was cut off or slow, must not become one to restore from.
        """
        progress = self._membership.progress
        ahead = progress.ahead(receipt.step, receipt.generation)
        if ahead or progress.is_void(receipt.generation):
            self._publisher.left(receipt.step)
            return
        try:
            size = await self._publisher.take(receipt, training_state, writers)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            await self.failed(receipt.step, receipt.generation, reason)
            return
        if size is None:
            if self._publisher.gave_up(receipt.step, receipt.generation):
                self._give_up(receipt.step, receipt.generation)  # what it wrote goes, too
            return
        if progress.is_void(
            receipt.generation
        ):  # since it was begun: `Retreat` may not have seen it
            await asyncio.to_thread(self._set_aside, receipt.step)
            return
        self._note_lost()
        now = time.time()
        self._membership.progress.checkpointed(receipt.step)
        self._records.note(
            events.CheckpointCommitted(
                time=now,
                step=receipt.step,
                generation=receipt.generation,
                bytes=size,
                seconds=now - started,
            )
        )
        await self._dispatcher.advance()
        # A store that does not answer must hold neither the writers nor the run's end for long.
        retiring = self._dispatcher.spawn(self._retire(receipt.step))
        await asyncio.wait({retiring}, timeout=_DELETING_S)

    async def _retire(self, step: int) -> None:
        """Writes down that old checkpoints stay, once until they can be deleted again."""
        reason, told = await self._publisher.retire(step), self._undeleted_told
        self._undeleted_told = reason is not None
        if reason is not None and not told:
            self._records.note(events.RetentionFailed(time=time.time(), reason=reason))

    def _give_up(self, step: int, generation: int) -> None:
        """Nobody waits for it: its writers are to be ready for the next save."""
        self._dispatcher.spawn(self._publisher.give_up(step, generation))

    def _set_aside(self, step: int) -> None:
        give_up(open_store(self._paths.checkpoints), Keys(), step)
        self.forget(step)

    def _note_lost(self) -> None:
        """Writes down the checkpoints that a later one has passed: a writer of theirs was lost."""
        while self._publisher.lost:
            step, parts = self._publisher.lost.popitem()
            reason = (
                f"only {parts} of its parts were written: a worker was lost before it had copied"
            )
            self._records.note(events.CheckpointSkipped(time=time.time(), step=step, reason=reason))

    async def failed(self, step: int, generation: int, reason: str) -> None:
        """A checkpoint could not be written by the roster of `generation`; each of its writers may
        say so. Unless it was the last one, the run goes on; and also where a newer roster has
        written that, or is about to."""
        progress = self._membership.progress
        if progress.is_void(generation) or self.saved(step):
            self._publisher.left(step)
            return
        if (step, generation) not in self._failed:
            self._failed.add((step, generation))
            self._save_wish.failed(step)
            self._records.note(events.CheckpointSkipped(time=time.time(), step=step, reason=reason))
        if step >= self._membership.until and generation >= progress.generation:
            await self._dispatcher.stop(f"the last checkpoint could not be written: {reason}")
        self._give_up(step, generation)
