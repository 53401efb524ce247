"""The coordinator's part in restoring: it looks itself at a checkpoint that workers cannot read.

Where that shows the same, it is given up. Else the machine of who could not read it is at fault: a
node without the mount, or with bad memory, must not cost the run all its sound checkpoints.
"""

from __future__ import annotations

import asyncio
import math
import time

from checkpointing import (
    CheckpointError,
    CorruptError,
    Keys,
    OtherRecordError,
    StoreUnavailableError,
    decide_fault,
    give_up,
    is_damage,
    load_manifest,
    look_again,
    newest,
    open_store,
)
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import STORAGE
from elastic.protocol.run_identity import check_own

_ANSWER_S = 60.0
"""A store that workers cannot reach, and that has not answered here by then, is out of reach."""

_PATIENCE_S = 600.0
"""For which a store that is away for all is tried again, by one roster after the other: as long as
a save tries (`S3Config.timeout_s`)."""

_LOOK_S = 2.0
"""Between two looks whether it is back."""


class Restores:
    """Gives up checkpoints that cannot be read.

    Args:
        config: where the checkpoints are.
        membership: told what is left to go on from.
        dispatcher: ends the run where it cannot go on.
        workers: lose those whose machine is at fault.
        records: where it is written down.
        receipts: told that the step may be committed again.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        records: RunLog,
        receipts: Receipts,
    ) -> None:
        self._config, self._membership, self._dispatcher = config, membership, dispatcher
        self._workers, self._records, self._receipts = workers, records, receipts
        self._deciding = asyncio.Lock()
        self._corrupt_on: dict[int, set[str]] = {}
        """Step -> nodes on which its checkpoint was not as it was written, and here it was."""
        self._cut_off_in: dict[int, set[str]] = {}
        """Generation -> nodes from which the store could not be reached, and from here it could."""
        self._tried_again: dict[str, int] = {}
        """Such a node -> generation after which the next roster tries once more."""
        self._away_since_s, self._came = -math.inf, -1
        """Since when nobody reaches the store, and the steps that had come by then."""
        self._waited_in = 0
        """Generation that could not reach it, after which the next roster tries again."""
        records.followers.append(self._hear)

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.CheckpointCommitted):
            self._corrupt_on.pop(event.step, None)  # what was read there was another one
            self._tried_again.clear()

    async def failed(self, worker: str, step: int, generation: int, error: CheckpointError) -> None:
        """`worker`, of the roster of `generation`, could not read the checkpoint of `step`; several
        may say so, and all return when it is decided.

        What cannot be reached now may be sound: where the store may come back, the next roster
        tries again, for `_PATIENCE_S`; then the run ends, and nothing is changed. What reads
        well here is: then the machine of the worker is at fault, and the worker is lost. Unless two
        machines read other bytes: this one may have them from a cache of its own. Who could not
        reach the store tries once more, with the next roster: it may have been away for a while.
        Nor is it the machine where two of that roster cannot: all would be lost. Where workers have
        opened different records, those whose record lies here stay.
        """
        async with self._deciding:
            membership = self._membership
            progress = membership.progress
            known = (progress.restore_step, progress.generation) != (step, generation)
            if known or membership.stopped is not None or self._waited_in == generation:
                return
            began_s = time.monotonic()
            if isinstance(error, OtherRecordError) and await self._lies_here(step, error.sha256):
                return
            damage, seen = is_damage(error), await self._look_again(step, error)
            if seen is not None and await self._waits(step, generation, error, seen, began_s):
                return
            fault = decide_fault(error, seen)
            if fault == "reader" and not damage and self._tries_again(worker, generation):
                return
            if fault == "reader" and self._is_so_elsewhere(worker, step, error):
                fault = "checkpoint" if damage else "store"
            reason = str(seen if damage and seen is not None else error)
            if fault == "reader":
                await self._workers.kill(worker, STORAGE, _describe_reader(step, error))
                return
            self._records.note(events.CheckpointFailed(time=time.time(), step=step, reason=reason))
            if fault == "store":
                await self._dispatcher.stop(
                    f"the checkpoint of step {step} cannot be reached: {reason} Nothing was "
                    f"changed; run the same name again once its store answers"
                )
                return
            try:
                await self._give_up(step, reason)
            except CheckpointError as failure:
                await self._dispatcher.stop(
                    f"the checkpoint of step {step} cannot be read ({reason}), and cannot be set "
                    f"aside: {failure}"
                )

    async def _waits(
        self,
        step: int,
        generation: int,
        told: CheckpointError,
        seen: CheckpointError,
        began_s: float,
    ) -> bool:
        """Whether the next roster tries again, as nobody reaches the store, and it may come back.
        Returns when it is back, or an answer here was waited for for `_ANSWER_S`.

        Args:
            step: of the checkpoint.
            generation: of the roster that was to read it.
            told: what a worker of it says.
            seen: what is seen from here.
            began_s: when the worker said so, by the monotonic clock.
        """
        if not (_may_pass(told) and _may_pass(seen)):
            return False
        membership, progress = self._membership, self._membership.progress
        if progress.came != self._came:  # it was read since, or never was away
            self._away_since_s, self._came = began_s, progress.came
            self._records.note(events.RestoreWaits(time=time.time(), step=step, reason=str(told)))
        most = self._config.groups.max_regroups_without_progress
        over = began_s - self._away_since_s > _PATIENCE_S
        if over or progress.spent_in_vain + 1 >= most:
            return False
        self._waited_in = generation
        until_s = began_s + min(_ANSWER_S, self._config.health.regroup_timeout_s / 2)
        still: CheckpointError | None = seen
        while (
            still is not None
            and _may_pass(still)
            and membership.stopped is None
            and time.monotonic() < until_s
        ):
            await asyncio.sleep(_LOOK_S)
            still = await self._look_again(step, told)
        return True

    def _tries_again(self, worker: str, generation: int) -> bool:
        """Whether no roster before that of `generation` had a worker on this node that could not
        reach the store, since a checkpoint was committed. Notes this one."""
        if worker not in self._workers.started:
            return False
        node = self._workers.started[worker].node
        return self._tried_again.setdefault(node, generation) == generation

    def _is_so_elsewhere(self, worker: str, step: int, error: CheckpointError) -> bool:
        """Whether another node read other bytes, too, than were written, or another one of this
        roster could not reach the store either. Notes this one."""
        if worker not in self._workers.started:
            return False
        if isinstance(error, CorruptError):
            nodes = self._corrupt_on.setdefault(step, set())
        elif not is_damage(error):
            nodes = self._cut_off_in.setdefault(self._membership.progress.generation, set())
        else:
            return False
        nodes.add(self._workers.started[worker].node)
        return len(nodes) > 1

    async def _lies_here(self, step: int, sha256: str) -> bool:
        """Whether the record of `step` with this hash is the one that this machine reads."""
        store = open_store(self._config.paths.checkpoints)
        try:
            return (await asyncio.to_thread(load_manifest, store, Keys(), step)).sha256 == sha256
        except CheckpointError:
            return False

    async def _look_again(self, step: int, told: CheckpointError) -> CheckpointError | None:
        """See `_look`. A store that refused a worker may not answer this machine at all."""
        look = asyncio.to_thread(self._look, step, told)
        try:
            return await asyncio.wait_for(look, None if is_damage(told) else _ANSWER_S)
        except asyncio.TimeoutError:
            return told

    def _look(self, step: int, told: CheckpointError) -> CheckpointError | None:
        """What is wrong with a checkpoint as this machine sees it; None: nothing. Blocks."""
        try:
            manifest = look_again(open_store(self._config.paths.checkpoints), Keys(), step, told)
            check_own(manifest, self._config.identity, None)
        except CheckpointError as error:
            return error
        return None

    async def _give_up(self, step: int, reason: str) -> None:
        store, keys = open_store(self._config.paths.checkpoints), Keys()
        earlier = await asyncio.to_thread(newest, store, keys, before=step)
        membership = self._membership
        # The last one stays in its place: without it, the next start would begin from the seed.
        if earlier is not None or membership.progress.snapshot_step > 0:
            await asyncio.to_thread(give_up, store, keys, step)
            self._receipts.forget(step)
        membership.progress.checkpoint_lost(
            newest=0 if earlier is None else earlier.step,
            reason=f"the checkpoint of step {step} cannot be read: {reason} There is no other "
            f"saved state to go on from. Repair it, or start from the seed: with "
            f"resume='never', another run_config.name, or after elastic checkpoints delete --force",
        )


def _may_pass(error: CheckpointError) -> bool:
    return isinstance(error, StoreUnavailableError) and error.may_pass


def _describe_reader(step: int, error: CheckpointError) -> str:
    return (
        f"it could not read the checkpoint of step {step}, which reads well on the coordinator's "
        f"machine: {error} Look at the mount of the store on this node, its memory and network card"
    )
