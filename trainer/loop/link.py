"""What the loop and the control plane are to each other: what the loop is given, and what it tells.

`elastic` implements `Link`; the same loop runs without a cluster on any other implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.engine.engine import Engine
from trainer.loop.clock import OwnTimes, StepTimes
from trainer.loop.phases import Phase
from trainer.loop.samples import Skips
from trainer.recovery.heal import Newcomer
from trainer.replication.step_commit import Commit, Place, Saving


@dataclass(kw_only=True)
class Progress:
    """Where a worker's state is in the run. It travels with the state in heals and checkpoints."""

    step: int = 0
    """Steps committed so far; the index of the next one."""
    skipped_in_a_row: int = 0
    """Committed steps, up to the last one, whose loss or gradient was not finite."""
    last: Commit | None = None
    """Outcome of step - 1, where this worker was there."""
    in_step: bool = False
    """Whether work on `step` has begun."""
    applying: bool = False
    """The optimizer is at work: after an exception the state is of no step."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What the loop needs to know beyond `TrainConfig`."""

    lanes: int
    """Lanes of the run."""
    save_every: int | None
    """Steps between checkpoints; None: those that a worker asks for, and one at the end."""
    snapshot_every: int | None = None
    """Steps between snapshots in the nodes' memory."""
    compare_every: int | None
    """Steps between comparisons of the replicas."""
    max_nonfinite_steps: int | None
    """Skipped steps in a row that end the run; None: others see to it."""
    skips: Skips = ()
    """Samples that the run passes over."""
    witness_every: int | None = None
    """Steps from one lane that is computed by several replicas to the next; None: none is."""
    until: int
    """Steps at which the run ends."""
    generation: int = 0
    """Of the roster; it is noted in its commits."""


class Link(Protocol):
    """What the loop needs from the control plane.

    What is called within a step may neither block nor wait for an answer; `save`, `save_skipped`,
    `compared` and `evaluated` come between steps, where the workers of a replica may agree on
    something.
    """

    def leave_now(self) -> bool:
        """A fault was announced: abandon what waits for other replicas."""
        ...

    def leave_at_boundary(self) -> bool:
        """A planned regroup was announced: leave together, after a commit."""
        ...

    def at_step(self, step: int, phase: Phase) -> None:
        """The worker enters a phase of a step; heartbeats and injected faults hang here."""
        return

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """A step has been committed and, unless it was skipped as non-finite, applied."""
        return

    def timed(self, times: StepTimes) -> None:
        """Where the time of some steps went, on this worker."""
        return

    def worked(self, own: OwnTimes) -> None:
        """What a step took of this worker itself."""
        return

    def caught_up(self, newcomer: Newcomer) -> None:
        """This worker, which had joined without state, has it now."""
        return

    def heal_failed(self, reason: str) -> None:
        """The state that this worker was to receive did not arrive."""
        return

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        """A copy of the state before `step` is due in each of `places`, from this worker."""
        return

    def saving(self) -> Saving:
        """What this worker has to say about saves; asked before each commit."""
        ...

    def recorded(self) -> int:
        """Steps that the run's records hold, as far as the lead knows; 0 from all others. Asked
        before each commit."""
        ...

    def save_skipped(self, step: int, places: Sequence[Place]) -> None:
        """Copies that were due before `step` are not made: the ones before are being written."""
        return

    def compared(self, step: int, checksums: list[int | None], confirmed: bool) -> None:
        """The checksums of this worker's slot in all replicas, by position, before `step`;
        `confirmed`, which the first replica alone knows: all slots' show that they agree."""
        return

    def witnessed(self, step: int, digests: Mapping[int, int]) -> bool:
        """What the gradient of one lane was with each replica that computed it, by position. Asked
        within the commit, the same on all workers. Returns whether the step may count."""
        ...

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        """The mean loss on the held-out data before `step`."""
        return


class NoLink(Link):
    """A loop's link without a control plane: nobody to tell anything."""

    def leave_now(self) -> bool:
        """See Link."""
        return False

    def leave_at_boundary(self) -> bool:
        """See Link."""
        return False

    def saving(self) -> Saving:
        """See Link."""
        return Saving()

    def recorded(self) -> int:
        """See Link."""
        return 0

    def witnessed(self, step: int, digests: Mapping[int, int]) -> bool:
        """See Link."""
        return True
