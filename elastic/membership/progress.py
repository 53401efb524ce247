"""How far the run is: which steps are recorded, what is saved, when it went back last. Pure."""

from __future__ import annotations


class Progress:
    """Steps and generations of the run.

    Args:
        generation: the last generation that anything was written under, 0 for a new run.
        restore_step: step of the newest checkpoint, 0 without one; updated by `checkpointed`.
        snapshot_step: step of the newest readable snapshot, 0 without one; see `snapshotted`.
    """

    def __init__(
        self, *, generation: int = 0, restore_step: int = 0, snapshot_step: int = 0
    ) -> None:
        self.generation = generation
        self.restore_step, self.snapshot_step = restore_step, snapshot_step
        self.recorded = self.reached = self.stored
        """Steps that are in the records, and steps that somebody has done."""
        self.began = 0
        """Step that the newest roster began at."""
        self.came = 0
        """How many steps were recorded here, those that were done again among them."""
        self.in_vain = 0
        """Regroups in a row after faults, with no step committed in between, that no loss of a
        worker explains."""
        self._explained = False
        """A worker was lost since the newest roster stood."""
        self._failed_at = -1
        """Step that a fault made a roster go on at last; below 0: none has."""
        self.since = 0
        """Generation in which the run went back last: what is held of older ones is void."""
        self.unreadable: str | None = None
        """Why the newest checkpoint could not be read, where that has happened."""

    @property
    def stored(self) -> int:
        """Step of the newest checkpoint or snapshot, 0 without one."""
        return max(self.restore_step, self.snapshot_step)

    def resume(self, *, generation: int, restored: int, recorded: int, began: int) -> None:
        """Goes on from the records of a run whose coordinator was lost. See
        `Membership.resume`."""
        self.generation = max(self.generation, generation)
        self.since, self.began = restored, began
        self.recorded, self.reached = recorded, max(recorded, self.reached)

    # -- facts -------------------------------------------------------------------------------------

    def saw(self, step: int | None) -> None:
        """A worker is at `step`, None where it has no state."""
        self.reached = max(self.reached, step or 0)

    def record(self, step: int) -> None:
        """`step` is committed and in the records."""
        self.recorded = step + 1
        self.came += 1
        self.saw(step + 1)

    def checkpointed(self, step: int) -> None:
        """A checkpoint of `step` is committed."""
        self.restore_step = max(self.restore_step, step)

    def checkpoint_lost(self, *, newest: int, reason: str) -> None:
        """The newest checkpoint cannot be read: now it is that of `newest`, 0 without one.

        Args:
            newest: step.
            reason: what ends the run where nothing is left to go on from but the seed.
        """
        self.restore_step, self.unreadable = newest, reason

    def snapshotted(self, step: int) -> None:
        """The newest snapshot that can be read is of `step`; 0: there is none (any more)."""
        self.snapshot_step = step

    def void(self, step: int) -> None:
        """What anybody holds now is of doubtful value, and so is what was saved of it: the next
        roster goes on from the checkpoint of `step`, or from the seed."""
        known = self.restore_step if self.going_back else step
        self.restore_step, self.snapshot_step = min(step, known), 0
        if step == 0:
            self.unreadable = None  # on purpose from the seed, not for lack of another state
        self.since = self.generation + 1

    def lost(self) -> None:
        """A worker was lost: that may explain the next regroup, and has a budget of its own."""
        self.in_vain, self._explained = 0, True

    def interrupted(self, step: int) -> None:
        """A fault has called for a roster, which is to go on at `step`."""
        if self._explained:
            self.in_vain = 0
        else:
            self.in_vain = self.spent_in_vain + 1 if step == self._failed_at else 1
        self._failed_at = step

    def begin(self, step: int, *, back: bool) -> None:
        """The next roster stands at `step`, with what its workers hold; or the run went `back`
        there, to what is saved or to the seed."""
        self.generation += 1
        self.began, self._explained = step, False
        if back:
            self.recorded = self.reached = step
            self.since = self.generation

    # -- questions ---------------------------------------------------------------------------------

    def awaits(self, step: int, generation: int) -> bool:
        """Whether a record of `step`, done in `generation`, is one that is missing.

        All of an older generation were shown when their workers joined for this one, but for those
        of workers who were in no roster since, and whose state the others went on with later.
        """
        if generation == self.generation:
            return step >= self.recorded
        return step == self.recorded < self.began and generation >= self.since

    @property
    def spent_in_vain(self) -> int:
        """`in_vain`; 0 once a step has been committed since the last of those regroups."""
        return 0 if self.recorded > self._failed_at else self.in_vain

    @property
    def going_back(self) -> bool:
        """Whether the next roster goes on from what is saved, whoever holds what."""
        return self.since > self.generation

    def is_void(self, generation: int) -> bool:
        """Whether what workers of `generation` save does not count: the run has gone back since."""
        return generation < self.since

    def ahead(self, step: int, generation: int) -> bool:
        """Whether a save of `step`, by workers of `generation`, holds steps that are in no record
        and never will be: they were lost before they told of them, and the run went on without."""
        return generation < self.generation and step > self.recorded
