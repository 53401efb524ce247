"""Going back: what all hold, and what was saved of it, is given up for an earlier saved state."""

from __future__ import annotations

import asyncio
import time

from checkpointing import CheckpointError, Keys, list_steps, newest, open_store, set_aside
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

    async def go_back(self, *, at_most: int, reason: str, skip: Skip | None = None) -> None:
        """Takes everybody back to the newest checkpoint of step `at_most` or before; without one,
        to the seed. A run that was continued from a checkpoint does not begin anew: it ends.

        When it returns, no save of the steps that are given up can come to count any more.

        Args:
            at_most: see above.
            reason: in words.
            skip: samples that are not taken again.
        """
        store, keys = open_store(self._config.paths.checkpoints), Keys()
        try:
            found = await asyncio.to_thread(newest, store, keys, before=at_most + 1)
        except CheckpointError as error:
            await self._dispatcher.stop(f"{reason}. The checkpoints cannot be looked at: {error}")
            return
        step = 0 if found is None else found.step
        if found is None and self._config.started.start_step > 0:
            await self._dispatcher.stop(
                f"{reason}. There is no checkpoint of step {at_most} or before to go back "
                f"to: keep more of them (checkpoint.keep_last, keep_every)"
            )
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
        try:
            await asyncio.to_thread(self.give_up_after, step)
        except CheckpointError as error:
            await self._dispatcher.stop(f"{reason}. Later checkpoints cannot be set aside: {error}")
        await self._dispatcher.advance()

    def give_up_after(self, step: int) -> None:
        """Sets checkpoints later than `step` aside, also those that a coordinator before this one
        had no time for.

        Raises:
            CheckpointError: the store does not do it.
        """
        store, keys = open_store(self._config.paths.checkpoints), Keys()
        for later in list_steps(store, keys):
            if later > step:
                set_aside(store, keys, later)
                self._receipts.forget(later)
