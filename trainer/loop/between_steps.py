"""What is due between two steps: compare the replicas, save, evaluate.

The workers of a replica come here together, and nothing is in flight: here they may agree on
something, and wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.errors import CrossGroupLost
from trainer.loop.draws import seed_generators
from trainer.loop.link import Link, LoopConfig, Progress
from trainer.loop.loader import read
from trainer.loop.phases import Phase
from trainer.loop.samples import micro_seed
from trainer.parallel.apply import forget_gathered
from trainer.replication.replicas import CrossGroup
from trainer.replication.step_commit import Place, Saving


def plan_saves(progress: Progress, config: LoopConfig) -> tuple[list[Place], list[Place]]:
    """Where the state before `progress.step` is saved, and where that is due and skipped. Pure, and
    the same on all workers: what differs among them has come with the last commit.

    What was asked for waits for a place that is busy, and is not skipped.
    """
    step = progress.step
    if step == config.until:
        return ["store"], []
    saving = Saving() if progress.last is None else progress.last.saving
    every: dict[Place, int | None] = {"store": config.save_every, "memory": config.snapshot_every}
    due: list[Place] = [place for place, n in every.items() if n and step % n == 0]
    wanted: list[Place] = ["store"] if saving.wanted and "store" not in due else []
    skipped = [place for place in due if place in saving.busy]
    return [place for place in (*wanted, *due) if place not in saving.busy], skipped


def shows_agreement(checksums: Sequence[int | None]) -> bool:
    """Whether what the replicas have in a slot is known to be right, as far as they can tell. Pure.

    One alone shows nothing while others get their state: they may have been given it before a bit
    flipped in that one, and what it saves since is no better.

    Args:
        checksums: by position; None for one that has no state yet.
    """
    known = [checksum for checksum in checksums if checksum is not None]
    return len(set(known)) == 1 and len(known) >= min(2, len(checksums))


class BetweenSteps:
    """One worker's part of what is due in one generation.

    Args:
        engine: this worker's part of the model.
        cross: the group across replicas.
        progress: where it is in the run; read only.
        config: what holds for the whole run.
        link: the control plane.
        samples: in the training data.
        enter: called with the step and the phase that begins.
        all_evaluate: whether all workers of the roster evaluate.
    """

    def __init__(
        self,
        engine: Engine,
        cross: CrossGroup,
        *,
        progress: Progress,
        config: LoopConfig,
        link: Link,
        samples: int,
        enter: Callable[[int, Phase], None],
        all_evaluate: bool = True,
    ) -> None:
        self.engine, self.cross, self.progress = engine, cross, progress
        self.config, self.link, self.samples = config, link, samples
        self.enter, self.all_evaluate = enter, all_evaluate
        self.train: TrainConfig = engine.train_config

    def compare(self, *, has_state: bool) -> None:
        """From time to time, and at the end: whether all replicas hold the same bits. A group that
        fails in it fails the next step's reduce as well.

        Args:
            has_state: whether this worker has anything to compare; a newcomer takes part without.
        """
        step, every = self.progress.step, self.config.compare_every
        if not every or (step % every and step != self.config.until):
            return
        checksum = self.engine.state.checksum() if has_state else None
        # It waits for the others now, in a phase of which that is known. The clock's part stays.
        self.link.at_step(step - 1, "reduce")
        checksums: list[int | None] = []
        with suppress(CrossGroupLost):
            checksums = self.cross.gather_numbers(checksum)
        confirmed = self.all_slots_agree(checksums)
        if checksums:
            self.link.compared(step, checksums, confirmed)  # may wait for the coordinator
        self.link.at_step(step - 1, "after_commit")

    def all_slots_agree(self, checksums: Sequence[int | None]) -> bool:
        """Whether the replicas agree in all of their slots. The first replica agrees on that, which
        always has state; the others do not know. A worker sees its own slot alone, and where a bit
        flips in one, the same wrong sums leave all others equal.

        Args:
            checksums: of this worker's slot; none where a replica was lost.
        """
        if self.cross.rank > 0:
            return False
        return self.engine.sum_in_replica([float(not shows_agreement(checksums))])[0] == 0

    def save_and_evaluate(self) -> None:
        """What is due, and at the end both; where the run ends early it is only saved. All replicas
        with state save together, each its part; every replica evaluates for itself."""
        step = self.progress.step
        places, skipped = plan_saves(self.progress, self.config)
        if skipped:
            self.link.save_skipped(step, skipped)
        if places:
            self.save(places)
        if self.evaluates_now:
            self.evaluate()

    @property
    def evaluates_now(self) -> bool:
        """From time to time, and at the end of the run unless that comes early."""
        step, every = self.progress.step, self.train.eval_every
        return step == self.train.steps or bool(every and step % every == 0)

    def sit_out(self) -> None:
        """The part of a worker that does not evaluate in what the others do: it is there with each
        batch. In the next step's sum its time would be over where an evaluation takes longer."""
        if not self.evaluates_now:
            return
        for _ in self.batches():
            if not self.meet():
                return

    def save(self, places: Sequence[Place]) -> None:
        """Hands a copy of the state to the writers."""
        self.enter(self.progress.step, "checkpoint")
        state = {
            "step": self.progress.step,
            "optimizer_steps": self.engine.state.optimizer_steps,
            "skipped_in_a_row": self.progress.skipped_in_a_row,
            "seed": self.train.seed,
            "lanes": self.config.lanes,
            "global_batch": self.train.global_batch,
            "samples": self.samples,
            "skips": [list(skip) for skip in self.config.skips],
            "steps": self.train.steps,
            "optimizer": dict(self.train.optimizer.info),
            "task": dict(self.engine.task.info),
        }
        self.link.save(self.progress.step, self.engine, state, places)

    def all_leave(self, *, lost: bool) -> bool:
        """Whether a fault has called one of this replica's workers away, or it has `lost` the
        group across replicas: then all leave, since they are in the same collectives."""
        return self.engine.sum_in_replica([float(lost or self.link.leave_now())])[0] > 0

    def meet(self) -> bool:
        """Waits for those who evaluate and those who do not. False: one did not come, or a fault
        was announced; the next step's sum fails as well."""
        self.enter(self.progress.step, "reduce")
        try:
            self.cross.sum(torch.zeros(1, device=self.engine.device))
        except CrossGroupLost:
            return False
        return True

    def batches(self) -> range:
        """Where each batch of an evaluation begins, in the samples that are held out."""
        data = self.engine.task.eval_data()
        count = 0 if data is None else min(len(data), self.train.eval_samples)
        micro = self.train.micro_samples(self.config.lanes)
        return range(0, count, micro * self.train.parallel.shard)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the held-out samples, split over the replica's shard ranks. Random numbers
        are those of a lane that no replica has.

        A fault elsewhere ends it; it is not made up for, unless it is that of the run's end."""
        data, batches = self.engine.task.eval_data(), self.batches()
        if data is None or not batches:
            return
        shard, count = self.engine.slot.shard, batches.stop
        micro = self.train.micro_samples(self.config.lanes)
        loss_sum, tokens = 0.0, 0
        with _evaluating(self.engine.model):
            for start in batches:
                # Every rank runs every batch, for its peers' collectives; none is counted twice.
                # Whoever has nothing left computes as many as the others: of one alone there is no
                # variance.
                ids = [start + shard * micro + offset for offset in range(micro)]
                kept = [index for index in ids if index < count]
                lost = not (self.all_evaluate or self.meet())
                self.enter(self.progress.step, "evaluation")
                if self.all_leave(lost=lost):
                    return
                taken = np.asarray(kept or range(min(micro, count)), dtype=np.int64)
                seed = micro_seed(
                    self.train.seed,
                    self.progress.step,
                    self.config.lanes,
                    start // batches.step,
                    self.engine.slot.fsdp,
                )
                seeded = partial(seed_generators, seed, self.engine.device)
                seeded()
                batch = self.engine.take(read(data, taken, seeded))
                loss, terms = self.engine.task.loss(self.engine.model, batch)
                if kept and self.engine.slot.tensor == 0:
                    loss_sum, tokens = loss_sum + float(loss), tokens + terms
        loss_sum, total = self.engine.sum_in_replica([loss_sum, float(tokens)])
        self.link.evaluated(self.progress.step, loss_sum / max(1.0, total), int(total))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model evaluates in the block, and trains after it. A replica without lanes has no
    backward before the next step changes its weights, so nothing gathered may stay."""
    model.eval()
    yield
    model.train()
    forget_gathered(model)
