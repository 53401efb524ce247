"""One readable step, and the steps of one generation.

    lanes: forward and backward of the lanes dealt to this replica (reduce-scatter inside it)
    reduce: the lanes' gradients summed over the replicas, begun in the last lane's backward
    commit: a few numbers agreed on, first inside the replica, then across replicas
    apply: clip, optimizer step, step += 1

A worker that passes the commit knows that every worker holds the complete gradient of the step.
Nothing before the commit changes the weights, so an interrupted step leaves no trace. Where the
reduce fails because another replica is gone, the worker still enters the commit inside its own
replica, saying so: no healthy replica ever blocks in itself. Design: design.md, "The step and its
commit".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from trainer import commit as commits
from trainer.commit import Commit, LaneStats
from trainer.config import TrainConfig
from trainer.data import SampleSource
from trainer.engine import Engine
from trainer.errors import CrossGroupLost, NonFiniteError
from trainer.heal import Newcomer, Source
from trainer.lane_sums import LaneSums
from trainer.phases import Phase
from trainer.reduction import Reduction
from trainer.replicas import CrossGroup
from trainer.samples import lane_ids, lane_start, micro_seed, step_ids
from trainer.schedule import learning_rate

Place = Literal["store", "memory"]
"""Where copies of the state go: the checkpoint store, or the memory of the nodes."""
Outcome = Literal["finished", "boundary", "fault"]


class Link(Protocol):
    """What the loop needs from the control plane.

    What is called within a step may neither block nor wait for an answer; `save`, `compared` and
    `evaluated` come between steps, where the workers of a replica may agree on something.
    """

    def leave_now(self) -> bool:
        """A fault was announced: abandon what waits for other replicas."""
        ...

    def leave_at_boundary(self) -> bool:
        """A planned regroup was announced: leave together, after a commit."""
        ...

    def at_step(self, step: int, phase: Phase) -> None:
        """The worker enters a phase of a step; heartbeats and injected faults hang here."""
        ...

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """A step has been committed and, unless it was skipped as non-finite, applied."""
        ...

    def caught_up(self, newcomer: Newcomer) -> None:
        """This worker, which had joined without state, has it now."""
        ...

    def heal_failed(self, reason: str) -> None:
        """The state that this worker was to receive did not arrive."""
        ...

    def save(
        self, step: int, engine: Engine, training_state: dict[str, Any], places: Sequence[Place]
    ) -> None:
        """A copy of the state before `step` is due in each of `places`, from this worker."""
        ...

    def compared(self, step: int, checksums: list[int | None]) -> None:
        """The checksums of this worker's slot in all replicas, by position, before `step`."""
        ...

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        """The mean loss on the held-out data before `step`."""
        ...


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


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What the loop needs to know beyond `TrainConfig`."""

    lanes: int
    """Lanes of the run."""
    save_every: int | None
    """Steps between checkpoints."""
    snapshot_every: int | None = None
    """Steps between snapshots in the nodes' memory."""
    compare_every: int | None
    """Steps between comparisons of the replicas."""
    max_nonfinite_steps: int
    """Skipped steps in a row that end the run."""


class TrainLoop:
    """The steps of one worker in one generation.

    Args:
        engine: this worker's part of the model.
        cross: the group across replicas.
        sums: lane gradients, kept from generation to generation.
        lanes: the lanes dealt to this replica.
        progress: updated in place.
        config: what holds for the whole run.
        link: the control plane.
        source: where this worker's state is sent to newcomers.
        newcomer: where this worker has no state yet.
    """

    def __init__(
        self,
        engine: Engine,
        cross: CrossGroup,
        sums: LaneSums,
        *,
        lanes: Sequence[int],
        progress: Progress,
        config: LoopConfig,
        link: Link,
        source: Source | None = None,
        newcomer: Newcomer | None = None,
    ) -> None:
        self.engine, self.cross, self.sums, self.link = engine, cross, sums, link
        self.lanes, self.progress, self.config = lanes, progress, config
        self.train: TrainConfig = engine.train_config
        self.data: SampleSource = engine.task.train_data()
        self.source, self.newcomer = source, newcomer
        self.joined_without_state = newcomer is not None

    def run(self) -> Outcome:
        """Runs steps until the last one, a planned regroup, or a fault in another replica.

        Raises:
            RuntimeError: a collective inside the replica failed: a peer of this replica is gone.
            NonFiniteError: too many steps in a row were not finite.
        """
        if self.progress.step == self.train.steps:
            self.save_and_evaluate()  # whoever was to do it at the end may be gone
        while self.progress.step < self.train.steps:
            commit = self.try_step()
            if commit is None:
                return "fault"
            self.finish_step(commit)
            self.compare()
            self.save_and_evaluate()
            if commit.boundary:
                return "boundary"
        return "finished"

    def has_state(self) -> bool:
        """Asked when the generation is left: whether this worker's state is that of `progress`. A
        newcomer whose state has just arrived makes up for what it lacks."""
        if self.newcomer is not None and self.newcomer.finish():
            self.take_over(self.newcomer)
        return self.newcomer is None

    def try_step(self) -> Commit | None:
        """Computes and reduces the current step; None where another replica was lost before the
        commit."""
        step = self.progress.step
        self.progress.in_step = True
        if self.newcomer is not None:
            self.follow(self.newcomer)
        missing, reduction = self.sums.begin(step, self.lanes), self.make_reduction()
        for lane in missing:
            self.compute_lane(step, lane, reduction if lane == missing[-1] else None)
        self.link.at_step(step, "reduce")
        try:
            reduction.finish()
            failed = False
        except CrossGroupLost:
            self.engine.replace_gradient()
            failed = True
        self.link.at_step(step, "before_commit")
        return self.agree(step, failed)

    def compute_lane(self, step: int, lane: int, reduction: Reduction | None) -> None:
        """Forward and backward of all micro-batches of a lane.

        Args:
            step: the current step.
            lane: the lane.
            reduction: given with the last lane; starts as the gradients come in.
        """
        ids = lane_ids(
            self.train, self.config.lanes, len(self.data), step, lane, self.engine.slot.shard
        )
        micro = self.train.micro_samples(self.config.lanes)
        loss_sum, tokens = 0.0, 0
        gradient = self.sums.open(lane)

        def take(stop: int) -> None:
            self.sums.settle(stop)
            if reduction is not None:
                reduction.start(stop)

        for index, start in enumerate(range(0, len(ids), micro)):
            torch.manual_seed(
                micro_seed(self.train.seed, step, lane, index, self.engine.slot.shard)
            )
            self.link.at_step(step, "data")
            batch = to_device(self.data.batch(ids[start : start + micro]), self.engine.device)
            self.link.at_step(step, "forward")
            loss, count = self.engine.task.loss(self.engine.model, batch)
            self.link.at_step(step, "backward")
            if start + micro < len(ids):
                self.engine.backward(loss)
            else:
                self.engine.backward_into(gradient, loss, take)
            loss_sum, tokens = loss_sum + float(loss.detach()), tokens + count
        counts = self.engine.slot.tensor == 0
        first = lane_start(self.train, self.config.lanes, lane, self.engine.slot.shard)
        digest = commits.sample_digest(ids, first)
        stats = LaneStats(loss=loss_sum, tokens=tokens, digest=digest)
        self.sums.close(lane, stats if counts else LaneStats(loss=0.0, tokens=0, digest=0))

    def make_reduction(self) -> Reduction:
        """The sum of the lanes' gradients over the replicas into the engine's gradient."""
        return Reduction(
            self.cross,
            self.sums.blocks,
            self.engine.gradient,
            self.engine.buckets,
            exact=self.train.reduction == "exact",
        )

    def agree(self, step: int, failed: bool) -> Commit | None:
        """The commit reduce; None: the step does not count (yet).

        Summed inside the replica, then over the replicas by their first workers alone, then handed
        out inside the replica: all workers of a replica always come to the same answer, so none
        waits for one that left.
        """
        vector = commits.pack(
            self.config.lanes,
            self.sums.stats,
            norm_squared=0.0 if failed else self.engine.norm_squared(self.engine.gradient),
            failed=failed,
            boundary=self.link.leave_at_boundary(),
        )
        replica = self.engine.sum_at_first(vector)
        self.link.at_step(step, "in_commit")
        total = self.engine.hand_out(self.sum_over_replicas(replica))
        if total[1] > 0:
            return None
        self.link.at_step(step, "after_commit")
        return commits.unpack(total, step=step, lanes=self.config.lanes)

    def sum_over_replicas(self, replica: list[float]) -> list[float]:
        """Every replica's vector, added up. Only a replica's first worker crosses. The norm is the
        first replica's: how a replica adds up its workers' parts is its backend's choice."""
        if self.engine.rank > 0 or replica[1] > 0:
            return replica
        own = replica if self.cross.rank == 0 else [0.0, *replica[1:]]
        try:
            total = self.cross.sum(
                torch.tensor(own, dtype=torch.float64, device=self.engine.device)
            )
        except CrossGroupLost:
            return [replica[0], 1.0, *replica[2:]]
        return total.tolist()

    def finish_step(self, commit: Commit) -> None:
        """Applies a committed step. Also called after a regroup, for a step that others saw
        committed.

        Raises:
            NonFiniteError: this was one skipped step too many.
        """
        if self.newcomer is not None:
            self.newcomer.keep(commit)
        else:
            self.apply(commit)
        self.sums.clear()
        self.progress.step = commit.step + 1
        self.progress.last, self.progress.in_step = commit, False
        rate = learning_rate(self.train.optimizer, commit.step, self.train.steps)
        self.link.committed(commit, rate, commit.finite)
        if self.progress.skipped_in_a_row >= self.config.max_nonfinite_steps:
            samples = step_ids(self.train, len(self.data), commit.step)
            raise NonFiniteError(
                commit.step, self.progress.skipped_in_a_row, tuple(samples.tolist())
            )

    def apply(self, commit: Commit) -> None:
        """The optimizer step; none where the gradient is not finite."""
        self.link.at_step(commit.step, "optimizer")
        if self.source is not None:
            self.source.await_copy()
        if commit.finite:
            scale = commit.scale(self.train.optimizer.clip_norm)
            self.engine.apply(commit.step, scale=scale)
        self.progress.skipped_in_a_row = 0 if commit.finite else self.progress.skipped_in_a_row + 1

    def follow(self, newcomer: Newcomer) -> None:
        """A newcomer's part of a step, before the reduce: gets its state up to date."""
        newcomer.catch_up()
        failure = newcomer.take_failure()
        if failure is not None:
            self.link.heal_failed(failure)
        if newcomer.caught_up:
            self.take_over(newcomer)
            self.link.caught_up(newcomer)

    def take_over(self, newcomer: Newcomer) -> None:
        """From now on `progress` is that of the state."""
        self.progress.skipped_in_a_row = newcomer.skipped_in_a_row
        self.newcomer = None

    def compare(self) -> None:
        """From time to time: whether all replicas hold the same bits. A group that fails in it
        fails the next step's reduce as well."""
        step, every = self.progress.step, self.config.compare_every
        if not every or step % every:
            return
        checksum = None if self.newcomer is not None else self.engine.checksum()
        try:
            checksums = self.cross.gather_numbers(checksum)
        except CrossGroupLost:
            return
        self.link.compared(step, checksums)

    def save_and_evaluate(self) -> None:
        """What is due between two steps. The first replica saves; every replica evaluates for
        itself."""
        step, last = self.progress.step, self.progress.step == self.train.steps
        if self.joined_without_state:
            return  # its workers do not get their state at the same step
        every: dict[Place, int | None] = {
            "store": self.config.save_every,
            "memory": self.config.snapshot_every,
        }
        due = [place for place, n in every.items() if n and step % n == 0]
        if self.cross.rank == 0 and (last or due):
            self.save(["store"] if last else due)
        if last or (self.train.eval_every and step % self.train.eval_every == 0):
            self.evaluate()

    def save(self, places: Sequence[Place]) -> None:
        """Hands a copy of the state to the writers."""
        self.link.at_step(self.progress.step, "checkpoint")
        state = {
            "step": self.progress.step,
            "optimizer_steps": self.engine.optimizer_steps,
            "skipped_in_a_row": self.progress.skipped_in_a_row,
            "seed": self.train.seed,
            "lanes": self.config.lanes,
            "global_batch": self.train.global_batch,
            "samples": len(self.data),
            "steps": self.train.steps,
            "optimizer": asdict(self.train.optimizer),
            "task": dict(self.engine.task.info),
        }
        self.link.save(self.progress.step, self.engine, state, places)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the held-out samples, split over the replica's shard ranks."""
        data = self.engine.task.eval_data()
        if data is None or len(data) == 0:
            return
        self.link.at_step(self.progress.step, "evaluation")
        shard, shards = self.engine.slot.shard, self.train.parallel.shard
        count = min(len(data), self.train.eval_samples)
        micro = self.train.micro_samples(self.config.lanes)
        self.engine.model.eval()
        loss_sum, tokens = 0.0, 0
        for start in range(0, count, micro * shards):
            # Every rank runs every batch, for its peers' collectives; none is counted twice.
            ids = [start + shard * micro + offset for offset in range(micro)]
            kept = [index for index in ids if index < count]
            batch = to_device(
                data.batch(np.asarray(kept or [0], dtype=np.int64)), self.engine.device
            )
            loss, terms = self.engine.task.loss(self.engine.model, batch)
            if kept and self.engine.slot.tensor == 0:
                loss_sum, tokens = loss_sum + float(loss), tokens + terms
        self.engine.model.train()
        loss_sum, total = self.engine.sum_in_replica([loss_sum, float(tokens)])
        self.link.evaluated(self.progress.step, loss_sum / max(1.0, total), int(total))


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves a tensor, or each tensor in a list, tuple or dict, to `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
