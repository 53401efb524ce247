"""Replicas whose states differ: who was wrong, and back to where all were right.

A bit that flips in one replica is in its gradients from then on, and so in the sums that all
replicas apply. The comparison that finds it may come many steps later. So all go back to a
checkpoint that a comparison after it has confirmed, and do those steps again.

    compared, equal ──► checkpoints before it are sound
    compared, one differs from most ──► it is lost; all go back
    compared, no majority (two replicas) ──► all go back, and do the same steps again
        a step comes to other gradients than the first time, in lanes of one replica ──► that one
        the comparison shows what one had the first time ──► the other (`worker/disputes.py`)

Decision: docs/decisions/053.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.retreat import Retreat
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.workers import Workers
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import CORRUPTION
from health.corruption import find_other_lanes

_RECORDS_PATIENCE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a step came to, once."""

    gradients: bytes
    """Per lane; see `Commit`."""
    workers: Mapping[int, tuple[str, ...]]
    """Lane -> the workers of the replica that computed it."""


def decide_culprits(first: Done, again: Done) -> tuple[str, ...]:
    """Who computed a step otherwise than it was computed another time, from the same state.

    Returns:
        The workers of a replica that alone had the lanes that differ, both times; none where lanes
        of several replicas differ, or others computed them the second time.
    """
    lanes = find_other_lanes(first.gradients, again.gradients)
    who = {done.workers.get(lane) for done in (first, again) for lane in lanes}
    return (who.pop() or ()) if len(who) == 1 else ()


class Corruption:
    """What the coordinator does about states that differ.

    Args:
        start_step: what the run began from counts as sound.
        compares: whether replicas are compared at all.
        repeats: whether a step that is done again comes to the same bits.
        membership: knows the roster.
        dispatcher: carries out what follows.
        workers: loses those at fault.
        records: tells of comparisons and rosters.
        receipts: told which checkpoints to keep.
        retreat: takes the run back.
    """

    def __init__(
        self,
        *,
        start_step: int,
        compares: bool,
        repeats: bool,
        membership: Membership,
        dispatcher: Dispatcher,
        workers: Workers,
        records: RunLog,
        receipts: Receipts,
        retreat: Retreat,
    ) -> None:
        self.sound = start_step
        """Checkpoints up to this step are known to hold what they should."""
        self._since = 0
        """Generation in which the run went back last: older ones compared what was given up."""
        self._compares, self._remembers = compares, compares and repeats
        self._receipts = receipts
        self._keep_sound()
        self._membership, self._dispatcher, self._workers = membership, dispatcher, workers
        self._retreat = retreat
        self._holders: dict[int, tuple[str, ...]] = {}
        """Lane -> workers, in the newest roster."""
        self._done: dict[int, Done] = {}
        """Steps that no comparison has confirmed yet."""
        self._first: dict[int, Done] = {}
        """The same, of steps that are to be done again."""
        self._disputed: int | None = None
        """Step of the comparison that nobody could decide, until one confirms what came after."""
        self._disputed_in = 0
        """Generation of its roster."""
        self._going_back = asyncio.Lock()
        """Several say at once that a state was wrong: all go back once."""
        records.followers.append(self._hear)

    def replay(self, happened: Iterable[events.Event]) -> None:
        """Of a coordinator that was started anew: which checkpoints are sound, from the events of
        this start of the run. What is being done again is not: nobody is named by it."""
        for event in happened:
            self._follow(event)
        self._keep_sound()

    def _hear(self, event: events.Event) -> None:
        self._follow(event)
        self._keep_sound()
        if isinstance(event, events.ReplicasCompared) and self._confirms(event):
            self._confirm(event.step)
        elif isinstance(event, events.RegroupDone):
            self._holders = {
                lane: replica.workers
                for replica in self._membership.roster.replicas
                for lane in event.lanes.get(str(replica.index), ())
            }

    def _follow(self, event: events.Event) -> None:
        if isinstance(event, events.ReplicasCompared) and self._confirms(event):
            self.sound = max(self.sound, event.step - 1)
        elif isinstance(event, events.RegroupDone) and event.outcome == "restore":
            self.sound = min(self.sound, event.step)  # what is saved from here on nobody has seen
            self._since = event.generation

    def _confirms(self, event: events.ReplicasCompared) -> bool:
        """It may come late, when the steps before it were given up."""
        return event.equal and event.generation >= self._since

    def _keep_sound(self) -> None:
        if self._compares:
            self._receipts.keep(self.sound, by="corruption")

    def _confirm(self, step: int) -> None:
        self._done = {s: done for s, done in self._done.items() if s >= step}
        if self._disputed is not None and step >= self._disputed:
            self._disputed, self._first = None, {}

    def take(self, steps: Sequence[events.StepRecord]) -> None:
        """Steps were recorded."""
        if not self._remembers:
            return
        for record in steps:
            mine = record.generation == self._membership.roster.generation
            # A step of an earlier roster that comes late was another's work.
            done = Done(gradients=record.gradients, workers=self._holders if mine else {})
            first, self._done[record.step] = self._first.pop(record.step, None), done
            if first is not None and first.gradients != done.gradients:
                self._first = {}  # what comes after follows from it
                self._dispatcher.spawn(self._lose(decide_culprits(first, done), record.step))

    async def _lose(self, culprits: Sequence[str], step: int) -> None:
        if culprits:
            self._disputed = None
        for worker in culprits:
            detail = f"step {step} came to other gradients in its lanes when it was done again"
            await self._workers.kill(worker, CORRUPTION, detail)

    async def undecided(self, generation: int, step: int, detail: str) -> None:
        """The replicas of roster `generation` differ before `step`, and no majority shows which is
        right."""
        # The lead shows its steps before it says so; another may have come first.
        progress = self._membership.progress
        await self._dispatcher.until(lambda: progress.recorded >= step, _RECORDS_PATIENCE_S)
        if self._is_met(generation) or generation == self._disputed_in:
            return  # another slot has said so
        self._disputed_in = generation
        if self._disputed is not None:
            # Or whoever starts the run again goes on from what is in doubt.
            await self._retreat.go_back(at_most=self.sound, reason=detail)
            await self._dispatcher.stop(
                f"{detail}; so they did before step {self._disputed}, and what was done again "
                f"since does not show which is wrong. With a third replica a majority does"
            )
            return
        self._disputed = step
        self._first, self._done = self._done, {}
        await self._retreat.go_back(at_most=self.sound, reason=detail)

    async def outlier(self, worker: str, generation: int, detail: str, *, spread: bool) -> None:
        """A worker's state was not what it should be.

        Args:
            worker: it; it ends itself.
            generation: of its roster.
            detail: the evidence.
            spread: whether gradients may have been computed from it, and applied by all.
        """
        if spread:
            await self.spread(generation, detail)
        else:
            self._disputed, self._first = None, {}
        await self._workers.lose(worker, CORRUPTION, detail)

    async def spread(self, generation: int, detail: str) -> None:
        """In roster `generation` all may have applied gradients of a state that was not what it
        should be. Said by its worker, and by one who was right: either may die before its call."""
        async with self._going_back:
            if not self._is_met(generation):
                self._done = {}
                await self._retreat.go_back(at_most=self.sound, reason=detail)

    def _is_met(self, generation: int) -> bool:
        """Whether what was compared in a roster is given up already, or is about to be. A run that
        goes back for another reason may go to what is in doubt."""
        progress = self._membership.progress
        goes_far_enough = progress.going_back and progress.restore_step <= self.sound
        return generation != self._membership.roster.generation or goes_far_enough
