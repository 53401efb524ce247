"""One readable step, and the steps of one generation.

    lanes: forward and backward of the lanes dealt to this replica (reduce-scatter inside it)
    reduce: the lanes' gradients summed over the replicas, begun in the last lane's backward
    commit: a few numbers agreed on, first inside the replica, then across replicas
    apply: clip, optimizer step, step += 1

A worker that passes the commit knows that every worker holds the complete gradient of the step.
Nothing before the commit changes the weights, so an interrupted step leaves no trace. Where the
reduce fails because another replica is gone, the worker still enters the commit inside its own
replica, saying so: no healthy replica ever blocks in itself. Design: docs/architecture.md, "A
step and its commit".

A worker whose replica has broken may follow: without model and lanes it takes part in the reduce,
is told of the commit, and applies the step (docs/decisions/031).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch

from trainer.backend.groups import let_go_of_ended
from trainer.config import TrainConfig
from trainer.data import SampleSource
from trainer.data.batches import upload
from trainer.engine.engine import Engine
from trainer.errors import CrossGroupLost, NonFiniteError
from trainer.loop.between_steps import BetweenSteps
from trainer.loop.clock import StepClock, StepTimes
from trainer.loop.draws import seed_generators
from trainer.loop.link import Link, LoopConfig, Progress
from trainer.loop.loader import Loader
from trainer.loop.phases import Phase
from trainer.loop.profiling import StepProfiler
from trainer.loop.samples import lane_start, micro_batches, micro_seed, step_ids
from trainer.optimizer import checked_rate
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.replication import step_commit as commits
from trainer.replication.lane_sums import LaneSums, gradient_digests
from trainer.replication.reduction import Reduction
from trainer.replication.replicas import CrossGroup
from trainer.replication.step_commit import Commit, LaneStats
from trainer.replication.witnesses import Drawn, plan_witnesses

Outcome = Literal["finished", "boundary", "fault"]
Part = Literal["whole", "joining", "remnant"]
"""Of a replica with state; of one of which some or all workers had none when the roster began; of
what is left of one that broke, whose workers follow."""


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
        part: what this worker's replica is in the roster.
        followers: how many workers of no whole replica take part in the sums of each rank of the
            replica; empty: none.
        all_evaluate: whether every worker of the roster has the part "whole".
        profiler: looks at some steps.
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
        part: Part = "whole",
        followers: Sequence[int] = (),
        all_evaluate: bool = True,
        profiler: StepProfiler | None = None,
    ) -> None:
        self.engine, self.cross, self.sums, self.link = engine, cross, sums, link
        self.lanes, self.progress, self.config = lanes, progress, config
        self.train: TrainConfig = engine.train_config
        self.data: SampleSource = engine.task.train_data()
        self.loader: Loader | None = None
        self.source, self.newcomer = source, newcomer
        self.part, self.followed = part, bool(followers) and followers[engine.rank] > 0
        self.alone = cross.size == 1 and not any(followers)
        """No rank of this replica adds up anything with others. All ranks have to say the same:
        what lanes are kept where, and so which are computed again, follows from it."""
        self.clock, self.profiler = StepClock(engine.device, engine.block_times), profiler
        self.due = BetweenSteps(
            engine,
            cross,
            progress=progress,
            config=config,
            link=link,
            samples=len(self.data),
            enter=self.enter,
            all_evaluate=all_evaluate,
        )

    def run(self) -> Outcome:
        """Runs steps until the last one, a planned regroup, or a fault in another replica.

        Raises:
            RuntimeError: a collective inside the replica failed: a peer of this replica is gone.
            NonFiniteError: too many steps in a row were not finite.
            RateError: the schedule has no learning rate for a step.
        """
        try:
            return self.run_steps()
        finally:
            if self.loader is not None:
                self.loader.close()
            self.tell_times(self.clock.take())
            self.clock.close()

    def enter(self, step: int, phase: Phase) -> None:
        """This worker enters a phase."""
        self.clock.enter(phase)
        self.link.at_step(step, phase)

    def tell_times(self, times: StepTimes | None) -> None:
        """Where the time of some steps went, if that is known now."""
        if times is not None:
            self.link.timed(times)

    def run_steps(self) -> Outcome:
        """See `run`."""
        until = self.config.until
        if self.progress.step == until:
            self.save_and_evaluate()  # whoever was to do it at the end may be gone
        while self.progress.step < until:
            if self.profiler is not None:
                self.enter(self.progress.step, "profile")
                self.profiler.begin(self.progress.step)
            # Before anybody commits: an error of all after that would cost each copy of the state.
            checked_rate(self.train.optimizer, self.progress.step, self.train.steps)
            commit = self.try_step()
            if commit is None:
                return "fault"
            self.tell_times(self.clock.committed(commit.step))
            if (own := self.clock.take_own()) is not None:
                self.link.worked(own)
            self.finish_step(commit)
            if self.profiler is not None and self.profiler.is_last(commit.step):
                self.enter(self.progress.step, "profile")
                self.profiler.end()  # before what is due between steps
            self.due.compare(has_state=self.newcomer is None)
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
        self.clock.begin()
        let_go_of_ended()
        if self.newcomer is not None:
            self.follow(self.newcomer)
        witness = self.lanes_to_witness(step) if self.sums.is_new(step) else []
        missing = self.sums.begin(step, self.lanes, self.engine.gradient, alone=self.alone)
        self.begin_reading(step, [*witness, *missing])
        witnessed = [self.witness(step, lane) for lane in witness]
        reduction = self.make_reduction()
        for lane in missing:
            self.compute_lane(step, lane, reduction if lane == missing[-1] else None)
        self.enter(step, "reduce")
        try:
            reduction.finish()
            failed = False
        except CrossGroupLost:
            if self.cross.writes_on() and reduction.wrote:
                self.engine.replace_gradient()
            failed = True
        self.enter(step, "before_commit")
        return self.agree(step, failed, reduction.wrote, witnessed)

    def drawn(self, step: int) -> Drawn | None:
        """The lane of a step that several replicas compute."""
        every = self.config.witness_every
        return plan_witnesses(self.cross.lanes, seed=self.train.seed, step=step, every=every)

    def lanes_to_witness(self, step: int) -> list[int]:
        """The lane that this replica computes for another one, if there is one."""
        drawn = self.drawn(step)
        return [drawn.lane] if drawn is not None and self.cross.rank in drawn.witnesses else []

    def witness(self, step: int, lane: int) -> torch.Tensor:
        """Computes a lane before this replica's own, in memory that those do not need yet. Returns
        its digest."""
        gradient = self.engine.gradient
        self.sums.begin(step, [lane], gradient, alone=False)
        self.compute_lane(step, lane, None)
        digest = self.sums.gradients[lane]
        self.sums.clear()
        self.sums.begin(step, self.lanes, gradient, alone=self.alone)
        return digest

    def begin_reading(self, step: int, missing: Sequence[int]) -> None:
        """In the generation's first step, which computes the `missing` lanes: begins to read."""
        if self.loader is None:
            due = micro_batches(
                self.train,
                self.config.lanes,
                len(self.data),
                self.engine.slot.shard,
                steps=range(step, self.config.until),
                missing=missing,
                dealt=lambda later: [*self.lanes_to_witness(later), *self.lanes],
                skips=self.config.skips,
            )
            pin = self.engine.device.type == "cuda"
            self.loader = Loader(self.data, due, ahead=self.train.prefetch, pin=pin)

    def compute_lane(self, step: int, lane: int, reduction: Reduction | None) -> None:
        """Forward and backward of all micro-batches of a lane.

        Args:
            step: the current step.
            lane: the lane.
            reduction: given with the last lane; starts as the gradients come in.
        """
        assert self.loader is not None
        slot, lanes, taken = self.engine.slot, self.config.lanes, []
        last = self.train.lane_samples(lanes) // self.train.micro_samples(lanes) - 1
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        tokens = 0
        self.engine.collect_in(self.sums.open(lane))

        def take(stop: int) -> None:
            self.sums.settle(stop)
            if reduction is not None:
                reduction.start(stop)

        for index in range(last + 1):
            seed = micro_seed(self.train.seed, step, lane, index, slot.fsdp)
            seeded = partial(seed_generators, seed, self.engine.device)
            seeded()
            self.enter(step, "data")
            ids, samples = self.loader.take(seeded)
            taken.append(ids)
            batch = self.engine.take(samples)
            compiles = self.engine.compiles_next  # backward, too, in its first run
            self.enter(step, "compile" if compiles else "forward")
            loss, count = self.engine.task.loss(self.engine.model, batch)
            if not compiles:
                self.enter(step, "backward")
            if index < last:
                self.engine.backward(loss)
            else:
                self.engine.backward_at_last(loss, take)
            # Nobody waits for the device here.
            loss_sum, tokens = loss_sum + loss.detach().reshape(()), tokens + count
            self.clock.took(count, self.loader.read_s)
        # Tensor peers have the same loss, and all who share the samples the same ids.
        stats = LaneStats(tokens=0, digest=0)
        if slot.tensor == 0:
            first = lane_start(self.train, lanes, lane, slot.shard)
            digest = commits.sample_digest(np.concatenate(taken), first) if slot.part == 0 else 0
            stats = LaneStats(tokens=tokens, digest=digest)
        else:
            loss_sum = torch.zeros_like(loss_sum)
        self.sums.close(lane, stats, loss_sum)

    def make_reduction(self, kind: Callable[..., Reduction] = Reduction) -> Reduction:
        """The sum of the lanes' gradients over the replicas into the engine's gradient.

        Args:
            kind: makes it.
        """
        return kind(
            self.cross,
            self.sums.blocks,
            self.engine.gradient,
            self.engine.layout.buckets,
            exact=self.train.reduction == "exact",
            dtype=getattr(torch, self.train.reduce_dtype),
        )

    def agree(
        self, step: int, failed: bool, overwritten: bool, witnessed: Sequence[torch.Tensor]
    ) -> Commit | None:
        """The commit reduce; None: the step does not count (yet).

        Summed inside the replica, then over the replicas by their first workers alone, then handed
        out inside the replica: all workers of a replica always come to the same answer, so none
        waits for one that left.
        """
        follows = self.part == "remnant"
        norm_squared, losses, digests = self.counted(witnessed, without_norm=failed or follows)
        drawn = self.drawn(step)
        vector = commits.pack(
            self.config.lanes,
            self.sums.stats,
            losses,
            norm_squared=norm_squared,
            failed=failed,
            boundary=self.link.leave_at_boundary(),
            saving=self.link.saving(),
            recorded=self.link.recorded(),
            overwritten=overwritten,
            gradients=dict(zip(self.sums.gradients, digests, strict=False)),
            witnessed=self.as_witness(drawn, digests[len(losses) :]),
        )
        if follows:
            self.enter(step, "in_commit")
            total = self.sum_over_replicas(vector)
        else:
            replica = self.engine.sum_at_first(vector)
            self.enter(step, "in_commit")
            total = self.engine.hand_out(self.sum_over_replicas(replica))
        if self.followed and self.engine.rank > 0:
            total = self.tell_followers(total)
        if total[1] > 0:
            # Nobody asks a follower whether its gradient is whole: the step may count without it.
            self.progress.in_step = not (follows and failed)
            self.sums.overwritten = total[5] > 0
            return None
        if drawn is not None:
            found = commits.read_drawn(total, drawn, self.config.lanes)
            if not self.link.witnessed(step, found):
                self.sums.clear()  # it may be one of these that was wrong
                return None
        self.enter(step, "after_commit")
        config = self.config
        return commits.unpack(total, step=step, lanes=config.lanes, generation=config.generation)

    def as_witness(self, drawn: Drawn | None, digests: Sequence[float]) -> tuple[int, float] | None:
        """What this worker has to say of the lane that it witnessed, if it did."""
        number = None if drawn is None else drawn.number_of(self.cross.rank)
        return (number, digests[0]) if number is not None and digests else None

    def counted(
        self, witnessed: Sequence[torch.Tensor], *, without_norm: bool
    ) -> tuple[float, dict[int, float], list[float]]:
        """What this worker has counted on its device: its part of the squared norm, the losses of
        its lanes, and digests of their gradients and of one it `witnessed`. Waits for the device
        once."""
        engine, losses = self.engine, self.sums.losses
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        norm = zero if without_norm else engine.norm_squared(engine.gradient)
        bits = [*self.sums.gradients.values(), *witnessed]
        numbers = torch.stack([norm, *losses.values(), *gradient_digests(bits)]).tolist()
        norm_squared, *found = numbers
        return norm_squared, dict(zip(losses, found, strict=False)), found[len(losses) :]

    def tell_followers(self, total: list[float]) -> list[float]:
        """What was agreed on, for those who follow: with a state of another rank than the first
        they are in no sum of it. A group that fails in it fails the next step's reduce as well."""
        told = upload(total, self.engine.device)
        try:
            self.cross.hear(told)
        except CrossGroupLost:
            return total if self.part != "remnant" else [total[0], 1.0, *total[2:]]
        return told.tolist() if self.part == "remnant" else total

    def sum_over_replicas(self, replica: list[float]) -> list[float]:
        """Every replica's vector, added up. Only a replica's first worker crosses. The norm is the
        first replica's: how a replica adds up its workers' parts is its backend's choice. One
        replica sends nothing to the device, and waits for it no more."""
        if self.engine.rank > 0 or replica[1] > 0 or self.cross.size == 1:
            return replica
        own = replica if self.cross.rank == 0 else [0.0, *replica[1:]]
        try:
            total = self.cross.sum(upload(own, self.engine.device))
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
        self.clock.turn_to("other")
        self.sums.clear()
        self.progress.step = commit.step + 1
        self.progress.last, self.progress.in_step = commit, False
        rate = self.train.optimizer.rate(commit.step, self.train.steps)
        self.link.committed(commit, rate, commit.finite)
        most = self.config.max_nonfinite_steps
        if most is not None and self.progress.skipped_in_a_row >= most:
            samples = step_ids(self.train, len(self.data), commit.step, self.config.skips)
            raise NonFiniteError(
                commit.step, self.progress.skipped_in_a_row, tuple(samples.tolist())
            )

    def apply(self, commit: Commit) -> None:
        """The optimizer step; none where the gradient is not finite."""
        self.enter(commit.step, "optimizer")
        if self.source is not None and self.source.copies:
            # Its newcomers, without lanes, wait for this worker by now: it is not stuck in a step.
            self.link.at_step(commit.step, "heal_source")
            self.source.await_copy()
            self.link.at_step(commit.step, "optimizer")
        if self.engine.state.copies:  # for a save: it is that which takes long, and not the step
            self.enter(commit.step, "checkpoint")
            self.engine.state.await_copy()
            self.enter(commit.step, "optimizer")
        if commit.finite:
            scale = commit.scale(self.train.optimizer.clip_norm)
            self.progress.applying = True
            self.engine.apply(commit.step, scale=scale)
            self.progress.applying = False
        self.progress.skipped_in_a_row = 0 if commit.finite else self.progress.skipped_in_a_row + 1

    def follow(self, newcomer: Newcomer) -> None:
        """A newcomer's part of a step, before the reduce: gets its state up to date."""
        if newcomer.may_catch_up:
            # As long as what it lacks takes, not as a phase of a step; it has no lanes to compute.
            self.link.at_step(self.progress.step, "heal_target")
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

    def save_and_evaluate(self) -> None:
        """What is due between two steps, from a replica whose workers all have state: others do not
        get theirs at the same step."""
        if self.part == "whole":
            self.due.save_and_evaluate()
        else:
            self.due.sit_out()
