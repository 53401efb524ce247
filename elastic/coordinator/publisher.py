"""From the receipts of the saving workers to a committed checkpoint, and the end of old ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

from checkpointing import (
    AlreadyCommittedError,
    CheckpointConfig,
    Keys,
    NotCommittedError,
    Receipt,
    SliceError,
    Surveyor,
    commit,
    open_store,
    retire,
    sweep_attempts,
)
from elastic.protocol.run_paths import RunPaths

log = logging.getLogger(__name__)


class Publisher:
    """Commits a checkpoint once all its writers have written their parts.

    Args:
        paths: the run directory.
        config: retention.
        versions: library versions, kept in every manifest.
        newest: step of the newest committed checkpoint, 0 without one.
    """

    def __init__(
        self,
        paths: RunPaths,
        config: CheckpointConfig,
        *,
        versions: Mapping[str, str],
        newest: int,
    ) -> None:
        self._paths, self._config, self._versions = paths, config, versions
        self._receipts: dict[tuple[int, int], dict[int, Receipt]] = {}
        self._committing, self._retiring = asyncio.Lock(), asyncio.Lock()
        self._surveyor = Surveyor(store=open_store(paths.checkpoints), keys=Keys())
        self._saved = {newest} if newest else set()
        self._untold = set[int]()
        self._newest: tuple[int, int] | None = None
        self._failed = (0, 0)
        """Generation and step of the last attempt that failed: see `gave_up`."""
        self._littered = set[tuple[int, int]]()
        """Attempts that failed, and may have left segments since somebody last looked."""
        self._in_doubt = set[tuple[int, int]]()
        """Attempts whose record may be there, or come: their segments are left alone."""
        self._left = set[int]()
        """Steps of which segments may lie about that no record refers to: a retention that is past
        them looks for them."""
        self._generation, self._furthest = 0, newest
        """Of the last commit, and the greatest step of a receipt."""
        self._before = 0
        """Nor is what was written up to this step: see `replay`."""
        self.needed: dict[str, int] = {}
        """By whom -> step: the newest checkpoint of it or before stays, to go back to."""
        self.lost: dict[int, int] = {}
        """Steps of attempts that were passed by a later checkpoint -> parts that were written."""

    def saved(self, step: int) -> bool:
        """Whether a checkpoint of `step` is committed."""
        return step in self._saved

    async def newest(self) -> tuple[int, int] | None:
        """Step and generation of the newest checkpoint that was committed here, once the one that
        is being committed is: what the next save may refer to. None for none, and where the last
        could not be committed: then the next one is written whole."""
        async with self._committing:
            return self._newest

    def forget(self, step: int) -> None:
        """The checkpoint of `step` was set aside: another one may be committed."""
        self._saved.discard(step)
        self._untold.discard(step)
        self._surveyor.forget(step)
        self._newest = None

    def forget_after(self, step: int) -> None:
        """The run goes back to `step`: later ones may be committed again, those too that were
        deleted by the rules since."""
        for later in [saved for saved in self._saved if saved > step]:
            self.forget(later)

    def replay(self, told: Collection[int], recorded: int) -> None:
        """Of a coordinator that was started anew. The one before may have died between a commit and
        its record: then the receipts, handed in once more, complete it once more.

        Args:
            told: steps whose commit is in the records.
            recorded: steps of the run that are: the one before may have committed up to there, and
                its request may be on its way yet.
        """
        self._untold = self._saved - set(told)
        self._before = recorded
        self.left(recorded)

    async def take(
        self, receipt: Receipt, training_state: Mapping[str, Any], writers: int
    ) -> int | None:
        """Takes a receipt, one of `writers`.

        Returns:
            The checkpoint's bytes where this receipt completed it, else None.

        Raises:
            CheckpointError: it could not be committed.
        """
        self._furthest = max(self._furthest, receipt.step)
        if receipt.step < max(self._saved, default=0):
            self.left(receipt.step)
            return None  # handed in again, to a coordinator that was started anew, or too late
        attempt = (receipt.step, receipt.generation)
        if self.gave_up(*attempt):
            return None
        parts = self._receipts.setdefault(attempt, {})
        parts[receipt.rank] = receipt
        if len(parts) < writers:
            return None
        del self._receipts[attempt]
        async with self._committing:  # two attempts at the last step must not race each other
            if receipt.step in self._saved - self._untold or self.gave_up(*attempt):
                self.left(receipt.step)
                return None
            refers_to, self._newest = self._newest, None
            try:
                size = await asyncio.to_thread(
                    self._commit, list(parts.values()), training_state, refers_to
                )
            except BaseException as error:
                self.left(receipt.step)
                if not isinstance(error, (SliceError, NotCommittedError)):  # of before its record
                    self._in_doubt.add(attempt)
                if isinstance(error, AlreadyCommittedError) and receipt.step in self._untold:
                    return None  # by another attempt
                raise
            self._saved.add(receipt.step)
            self._untold.discard(receipt.step)
            self._newest = attempt
        if receipt.generation != self._generation:  # writers may be gone without a word
            self._generation = receipt.generation
            self.left(self._furthest)
        for attempt in [a for a in self._receipts if a[0] <= receipt.step]:
            parts = self._receipts.pop(attempt)  # it will not be completed, or too late
            self.left(attempt[0])
            if attempt[0] not in self._saved:
                self.lost[attempt[0]] = len(parts)
        return size

    def left(self, step: int) -> None:
        """Parts of a save of `step` may be written that are of no checkpoint."""
        self._left.add(step)

    def gave_up(self, step: int, generation: int) -> bool:
        """Whether that save, or one that was begun after it, failed: it will not be committed.
        Where one begins, no worker that is part of the commit is busy with another (a follower, or
        one that is drained, may be); and what lacks a part by then takes the room that the next
        ones need."""
        return (generation, step) <= self._failed and not self._may_be_committed(step, generation)

    def _may_be_committed(self, step: int, generation: int) -> bool:
        """By a request that is under way: this coordinator's, or that of the one before."""
        return step <= self._before or (step, generation) in self._in_doubt

    async def give_up(self, step: int, generation: int) -> None:
        """The save of `step` by the roster of `generation` failed: what is written of it and of
        those before goes, and what comes yet, or where there is little room the next one would fail
        for it. Each of its writers may say so: what it wrote is looked for again."""
        attempt = (step, generation)
        async with self._committing:
            if step in self._saved or self._may_be_committed(*attempt):
                self.left(step)
                return
            self._failed = max(self._failed, (generation, step))
            for passed in [a for a in self._receipts if self.gave_up(*a)]:
                parts = self._receipts.pop(passed)
                if passed[0] < step and passed[0] not in self._saved:
                    self.lost[passed[0]] = len(parts)
        await self._clear_up(attempt)

    async def _clear_up(self, attempt: tuple[int, int]) -> None:
        self._littered.add(attempt)
        async with self._retiring:
            if attempt not in self._littered:
                return  # somebody has looked since, for all who waited
            looked_for, self._littered = self._littered, set()
            try:
                await asyncio.to_thread(self._sweep)
            except Exception:  # the next retention tries again, and the next save that fails
                self._left |= {step for step, _ in looked_for}
                log.warning("what a failed save has left could not be deleted", exc_info=True)

    async def retire(self, newest: int) -> str | None:
        """Deletes what the rules no longer keep, once the run knows that it can go back to the
        checkpoint of `newest`: until then it may need the one before. Returns why it could not;
        None: it did."""
        async with self._retiring:
            past = {step for step in self._left if step < newest}
            self._left -= past
            try:
                await asyncio.to_thread(self._retire, newest, bool(past))
            except Exception as error:  # of any kind: the commit stands, and has to be told of
                log.warning("old checkpoints could not be deleted", exc_info=True)
                self._left |= past
                return f"{type(error).__name__}: {error}"
            return None

    def _commit(
        self,
        receipts: list[Receipt],
        training_state: Mapping[str, Any],
        refers_to: tuple[int, int] | None,
    ) -> int:
        store, keys, first = open_store(self._paths.checkpoints), Keys(), receipts[0]
        manifest = commit(
            store,
            keys,
            step=first.step,
            generation=first.generation,
            receipts=receipts,
            training_state=training_state,
            versions=self._versions,
            refers_to=None if refers_to is None else refers_to[0],
        )
        self._surveyor.forget(first.step)  # somebody may have deleted an earlier one of this step
        return sum(segment.size_bytes for segment in manifest.segments.values())

    def _sweep(self) -> None:
        sweep_attempts(self._renewed(), self.gave_up)

    def _retire(self, newest: int, littered: bool) -> None:
        retire(
            self._renewed(),
            keep_last=self._config.keep_last,
            keep_every=self._config.keep_every,
            up_to_step=newest,
            back_to=list(self.needed.values()),
            littered=littered,
        )

    def _renewed(self) -> Surveyor:
        """The connection of the one before may have credentials that have expired since."""
        self._surveyor.store = open_store(self._paths.checkpoints)
        return self._surveyor
