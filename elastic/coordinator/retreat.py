"""Going back: what all hold, and what was saved of it, is given up for an earlier saved state."""

from __future__ import annotations

import asyncio
import time

from checkpointing import (
    CheckpointError,
    CorruptError,
    Keys,
    NotCommittedError,
    Store,
    give_up,
    list_steps,
    load_manifest,
    newest,
    open_store,
    run_of,
)
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.snapshots import Snapshots
from elastic.membership.machine import Membership
from elastic.protocol import events
from trainer.loop.samples import Skip


class Retreat:
    """Takes the whole run back to a checkpoint, or to the seed.

    Args:
        config: where the checkpoints are, and where the run began.
        membership: calls everybody.
        dispatcher: carries out what follows.
        records: where it is written down.
        receipts: told of the checkpoints that count no more.
        snapshots: told as well.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        membership: Membership,
        dispatcher: Dispatcher,
        records: RunLog,
        receipts: Receipts,
        snapshots: Snapshots,
    ) -> None:
        self._config, self._membership, self._dispatcher = config, membership, dispatcher
        self._records, self._receipts, self._snapshots = records, receipts, snapshots
        self._going = 0
        """How many of those who said so wait for it."""

    async def go_back(self, *, at_most: int, reason: str, skip: Skip | None = None) -> None:
        """Takes everybody back to the newest checkpoint of step `at_most` or before; without one,
        to the seed. A run that was continued from a checkpoint does not begin anew: it ends; so
        does one whose checkpoints up to there cannot be read.

        When it returns, no save of the steps that are given up can come to count any more.

        Args:
            at_most: see above.
            reason: in words.
            skip: samples that are not taken again.
        """
        self._going += 1
        try:
            await self._go_back(at_most, reason, skip)
        finally:
            self._going -= 1

    @property
    def under_way(self) -> bool:
        """Whether the run goes back, or is about to: what is done meanwhile is given up."""
        return self._going > 0 or self._membership.progress.going_back

    async def _go_back(self, at_most: int, reason: str, skip: Skip | None) -> None:
        try:
            step, damaged = await asyncio.to_thread(self._find, at_most)
        except CheckpointError as error:
            await self._dispatcher.stop(f"{reason}. The checkpoints cannot be looked at: {error}")
            return
        if step == 0 and (damaged or self._config.started.start_step > 0):
            there = f"those of steps {damaged} cannot be read" if damaged else "there is none"
            await self._dispatcher.stop(
                f"{reason}. To go back, a checkpoint of step {at_most} or before is needed, and "
                f"{there}: keep more of them (checkpoint.keep_last, keep_every)"
            )
            return
        if self._records.over:  # nobody would know what was set aside, and why
            return
        membership = self._membership
        self._records.note(
            events.WentBack(
                time=time.time(),
                step=step,
                before=membership.progress.recorded,
                reason=reason,
                skip=[] if skip is None else list(skip),
            )
        )
        membership.go_back(step, () if skip is None else (skip,))
        self._snapshots.went_back(step, membership.progress.since)
        if not await self._records.durable() and skip is not None:
            # The run has been ended, and the next start would not know what to pass over.
            await self._dispatcher.advance()
            return
        try:
            await asyncio.to_thread(self._set_aside_after, step)
        except CheckpointError as error:
            await self._dispatcher.stop(f"{reason}. Later checkpoints cannot be set aside: {error}")
        self._receipts.forget_after(step)
        await self._dispatcher.advance()

    def give_up_after(self, step: int, *, only_own: bool = False) -> None:
        """Sets checkpoints later than `step` aside that a coordinator before this one had no time
        for. Blocks.

        Args:
            step: see above.
            only_own: those alone that are known to be this run's: others were brought here.

        Raises:
            CheckpointError: the store does not do it.
        """
        self._set_aside_after(step, only_own=only_own)
        self._receipts.forget_after(step)

    def _find(self, at_most: int) -> tuple[int, list[int]]:
        """Where to go back to, 0 for the seed; and the steps of checkpoints up to `at_most`, where
        none of them can be read."""
        store, keys = open_store(self._config.paths.checkpoints), Keys()
        found = newest(store, keys, before=at_most + 1)
        if found is not None:
            return found.step, []
        return 0, [step for step in list_steps(store, keys) if step <= at_most]

    def _set_aside_after(self, step: int, *, only_own: bool = False) -> None:
        store, keys = open_store(self._config.paths.checkpoints), Keys()
        for later in list_steps(store, keys):
            if later > step and (not only_own or self._is_own(store, later)):
                give_up(store, keys, later)

    def _is_own(self, store: Store, step: int) -> bool:
        try:
            return run_of(load_manifest(store, Keys(), step)) == self._config.identity.id
        except (CorruptError, NotCommittedError):  # nobody can say
            return False
