"""What runs in every Ray Train worker: join, build, train, regroup.

    join ──► Build: take a slot in a new replica ──► join
         ──► Run: a part of a roster: heal or restore, train ──► join
         ──► Stop

Spares wait in `join`. A worker whose replica breaks drops its model and joins again as a spare
would. A worker whose own code fails reports the traceback and exits: a crash is the one way out
that every peer notices at once.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from typing import Any

import ray
import torch

from checkpointing import CheckpointError, Keys, Reader, load_manifest, open_store
from elastic import events
from elastic.errors import RunFailedError
from elastic.job import Job
from elastic.link import CoordinatorLink
from elastic.messages import Build, Identity, Report, Run, Stop
from trainer.backend.groups import Rendezvous, leave_replica_group, make_replica_group
from trainer.engine import Engine
from trainer.errors import NonFiniteError
from trainer.heal import give_state, take_state
from trainer.lane_sums import LaneSums
from trainer.loop import LoopConfig, Progress, TrainLoop
from trainer.parallel.layout import slot_of
from trainer.replicas import CrossGroup

OWN_FAULT_EXIT_CODE = 70

State = tuple[dict[str, torch.Tensor], Mapping[str, Any]]
"""A worker's tensors by name, and the training state beside them."""


def train_worker(config: dict[str, Any]) -> None:
    """The train function that Ray Train calls on every worker, with the Job in `config["job"]`."""
    Worker(config["job"]).run()


class Worker:
    """One worker's life in a run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        torch.set_num_threads(max(1, int(job.scaling.cpus_per_worker)))
        rank = ray.train.get_context().get_world_rank()
        self.identity = Identity(
            worker=f"w{rank}-{uuid.uuid4().hex[:6]}",
            rank=rank,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
        )
        host, port = ray.get(job.coordinator.hello.remote(self.identity))
        self.rendezvous = Rendezvous(
            host=host, port=port, timeout_s=job.health.collective_timeout_s
        )
        self.link = CoordinatorLink(job.coordinator, self.identity, job)
        self.engine: Engine | None = None
        self.sums: LaneSums | None = None
        self.progress: Progress | None = None
        self.built = 0
        self.finished = False
        job.task.warm_up()

    def run(self) -> None:
        """Works until the run is over.

        Raises:
            RunFailedError: the coordinator ended the run with an error.
        """
        while True:
            answer = self.link.join(self.report())
            if isinstance(answer, Stop):
                self.stop(answer)
                return
            try:
                if isinstance(answer, Build):
                    self.build(answer)
                else:
                    self.train(answer)
            except NonFiniteError as error:
                self.link.fail(str(error))
            except Exception:
                self.recover(traceback.format_exc())

    def report(self) -> Report:
        """What this worker has now."""
        progress = self.progress
        return Report(
            identity=self.identity,
            built=self.built,
            step=None if progress is None else progress.step,
            in_step=progress is not None and progress.in_step,
            last=None if progress is None else progress.last,
            finished=self.finished,
        )

    def stop(self, answer: Stop) -> None:
        """Leaves the run."""
        self.link.close()
        self.drop()
        if answer.error is not None:
            raise RunFailedError(answer.error)

    def recover(self, detail: str) -> None:
        """After an exception: joins again where a peer was lost, exits where it was this worker's
        own."""
        step = None if self.progress is None else self.progress.step
        if self.link.trouble(step, detail):
            self.drop()
            return
        sys.stderr.write(f"{self.identity.worker} failed and leaves the run:\n{detail}")
        sys.stderr.flush()
        os._exit(OWN_FAULT_EXIT_CODE)

    def drop(self) -> None:
        """Lets go of the model and of the replica's process group."""
        self.engine = self.sums = self.progress = None
        self.built, self.finished = 0, False
        gc.collect()
        leave_replica_group()

    def build(self, answer: Build) -> None:
        """Makes this worker's part of a new replica, without state. All workers of the replica do
        it at once."""
        self.drop()
        train = self.job.train
        mesh = make_replica_group(
            self.rendezvous,
            f"replica/{answer.formed}",
            rank=answer.rank,
            shard=train.parallel.shard,
            tensor=train.parallel.tensor,
            device=self.job.scaling.device,
            leave_now=self.link.leave_now,
        )
        self.engine = Engine(
            self.job.task,
            train,
            slot=slot_of(answer.replica, answer.rank, train.parallel.tensor),
            mesh=mesh,
            device=self.job.scaling.device,
            max_replicas=self.job.scaling.max_replicas,
        )
        self.sums = LaneSums(self.job.lanes, self.engine.gradient.numel(), self.engine.device)
        self.built = answer.formed

    def train(self, run: Run) -> None:
        """This worker's part in one generation: gets its state up to date, then trains."""
        assert self.engine is not None and self.sums is not None
        cross = CrossGroup(
            self.rendezvous,
            f"cross/{run.generation}/{self.engine.rank}",
            lanes=run.lanes,
            total_lanes=self.job.lanes,
            rank=run.position,
            device=self.job.scaling.device,
            leave_now=self.link.leave_now,
        )
        try:
            self.catch_up(run, cross)
            if not self.bring_up(run, cross):
                return
            assert self.progress is not None
            self.finished = self.make_loop(run, cross, self.progress).run() == "finished"
        finally:
            cross.close()
        if self.finished:
            self.finish(run)

    def catch_up(self, run: Run, cross: CrossGroup) -> None:
        """Applies the last step where others saw it committed and this worker did not: it has the
        gradient."""
        progress = self.progress
        if progress is None or run.commit is None or run.restore or progress.step != run.step - 1:
            return
        loop = self.make_loop(run, cross, progress)
        loop.finish_step(run.commit)
        if progress.step < self.job.train.steps:  # at the end, `run` sees to it
            loop.save_and_evaluate()

    def bring_up(self, run: Run, cross: CrossGroup) -> bool:
        """Sees to it that the new replicas have state. Returns whether this one has."""
        assert self.engine is not None
        source = dict(run.heals).get(run.position)
        if run.restore:
            self.progress = self.restore(self.engine, run)
        elif source is not None:
            return self.heal(self.engine, run, cross, source)
        else:
            assert self.progress is not None
            if run.heals:
                give_state(self.engine, cross, self.progress, run.heals)
        return self.progress is not None

    def heal(self, engine: Engine, run: Run, cross: CrossGroup, source: int) -> bool:
        """Takes the state of a healthy replica."""
        started, progress = time.time(), Progress(step=run.step, last=run.commit)
        size = take_state(engine, cross, progress, run.heals)
        if size is None:
            return False
        self.progress = progress
        if engine.rank == 0:
            self.link.event(
                events.ReplicaHealed(
                    time=time.time(),
                    generation=run.generation,
                    replica=run.replica,
                    source=source,
                    bytes=size,
                    seconds=time.time() - started,
                )
            )
        return True

    def restore(self, engine: Engine, run: Run) -> Progress | None:
        """Loads the state of `run.step`, or starts from the seed at step 0. None where a worker of
        the replica cannot read its part of a snapshot: then nobody takes it."""
        if run.step == 0:
            engine.initialize()
            engine.optimizer_steps = 0
            return Progress()
        if run.source == "memory":
            read = self.read_snapshot(engine, run.step)
            if engine.sum_in_replica([float(read is None)])[0] > 0 or read is None:
                return None
            values, state = read
        else:
            store = open_store(self.job.paths.checkpoints)
            manifest = load_manifest(store, Keys(), run.step)
            values, state = engine.read(Reader(store, manifest)), manifest.training_state
        engine.load(values, optimizer_steps=int(state["optimizer_steps"]))
        return Progress(step=run.step, skipped_in_a_row=int(state["skipped_in_a_row"]))

    def read_snapshot(self, engine: Engine, step: int) -> State | None:
        """This worker's part of a snapshot; None, and the coordinator knows, where it cannot be
        read."""
        try:
            source, manifest = self.link.snapshot(step)
            return engine.read(Reader(source, manifest)), manifest.training_state
        except CheckpointError as error:
            self.link.snapshot_failed(step, str(error))
            return None

    def make_loop(self, run: Run, cross: CrossGroup, progress: Progress) -> TrainLoop:
        """The loop of this generation."""
        assert self.engine is not None and self.sums is not None
        return TrainLoop(
            self.engine,
            cross,
            self.sums,
            lanes=run.lanes[run.position],
            progress=progress,
            config=LoopConfig(
                lanes=self.job.lanes,
                save_every=self.job.checkpoint.every_steps,
                snapshot_every=self.job.checkpoint.memory_every,
                max_nonfinite_steps=self.job.health.max_nonfinite_steps,
            ),
            link=self.link,
        )

    def finish(self, run: Run) -> None:
        """Hands in everything that the run still needs from this worker."""
        assert self.engine is not None
        self.link.wait_for_writers()
        self.link.flush()
        slot = self.engine.slot
        where = f"generation {run.generation} shard {slot.shard} tensor {slot.tensor}"
        self.link.compare(where, self.engine.digest())
