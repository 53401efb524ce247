"""The coordinator's part in restoring: a checkpoint that no worker can read is given up."""

from __future__ import annotations

import asyncio
import time

from checkpointing import CheckpointError, Keys, newest, open_store, set_aside
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.run_log import RunLog
from elastic.membership.machine import Membership
from elastic.protocol import events


class Restores:
    """Gives up checkpoints that no worker can read.

    Args:
        config: where the checkpoints are.
        membership: told what is left to go on from.
        dispatcher: ends the run where it cannot go on.
        records: where it is written down.
        receipts: told that the step may be committed again.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        membership: Membership,
        dispatcher: Dispatcher,
        records: RunLog,
        receipts: Receipts,
    ) -> None:
        self._config, self._membership, self._dispatcher = config, membership, dispatcher
        self._records, self._receipts = records, receipts
        self._deciding = asyncio.Lock()

    async def failed(self, step: int, generation: int, reason: str, damaged: bool) -> None:
        """The roster of `generation` could not read the checkpoint of `step`; several workers of it
        may say so, and all return when it is decided.

        What cannot be reached now may be sound: the run ends, and nothing is changed.
        """
        async with self._deciding:
            membership = self._membership
            progress = membership.progress
            known = (progress.restore_step, progress.generation) != (step, generation)
            if known or membership.stopped is not None:
                return
            self._records.note(events.CheckpointFailed(time=time.time(), step=step, reason=reason))
            if not damaged:
                await self._dispatcher.stop(
                    f"the checkpoint of step {step} cannot be reached: {reason} Nothing was "
                    f"changed; run the same name again once its store answers"
                )
                return
            try:
                await self._give_up(step, reason)
            except CheckpointError as error:
                await self._dispatcher.stop(
                    f"the checkpoint of step {step} cannot be read ({reason}), and cannot be set "
                    f"aside: {error}"
                )

    async def _give_up(self, step: int, reason: str) -> None:
        store, keys = open_store(self._config.paths.checkpoints), Keys()
        earlier = await asyncio.to_thread(newest, store, keys, before=step)
        membership = self._membership
        # The last one stays in its place: without it, the next start would begin from the seed.
        if earlier is not None or membership.progress.snapshot_step > 0:
            await asyncio.to_thread(set_aside, store, keys, step)
            self._receipts.forget(step)
        membership.progress.checkpoint_lost(
            newest=0 if earlier is None else earlier.step,
            reason=f"the checkpoint of step {step} cannot be read: {reason} There is no other "
            f"saved state to go on from. Repair it, or start from the seed: with "
            f"resume='never', another run_config.name, or after elastic checkpoints delete --force",
        )
