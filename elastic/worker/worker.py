"""What runs in every Ray Train worker: join, build, train, regroup.

    hello ──► with `compile`, or text on GPUs: a rehearsal ──► join
    join ──► Build: take a slot in a new replica ──► join
         ──► Run: a part of a roster: heal or restore, train ──► join
         ──► Leave: let go of the replica, keep the state ──► join
         ──► Stop

Spares wait in `join`. A worker whose replica breaks joins again and keeps its state: it follows the
others with it, and builds its part of the replica anew beside the steps, or, where no replica is
left whole, makes one with other survivors. A worker whose own code fails reports the traceback and
exits: a crash is the one way out that every peer notices at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import ray
import torch

from elastic.errors import RunFailedError
from elastic.protocol.causes import (
    COLLECTIVE,
    COMPILER,
    DATA,
    DEVICE_ASSERT,
    GPU_ERROR,
    GPU_MEMORY,
    NETWORK,
    OUT_OF_MEMORY,
    STORAGE,
    USER_ERROR,
    Cause,
    entry_of,
)
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.job import Job
from elastic.protocol.messages import Build, Identity, Leave, LinkTest, Report, Run, Stop
from elastic.protocol.roster import cross_prefix, most_replicas, replica_prefix
from elastic.providers.sigterm import on_sigterm
from elastic.ray_compat.cluster import see_own_gpus
from elastic.worker.coordinator_link import CoordinatorLink
from elastic.worker.restoring import restore
from elastic.worker.run_sight import RunSight
from elastic.worker.side_build import SideBuild
from elastic.worker.versions import find_versions
from health.answers import offer_answers
from health.heartbeat import NO_STEP, Heartbeat
from health.process import output_files, read_born_ticks
from health.stacks import offer_stacks
from trainer.backend import determinism
from trainer.backend.flight_recorder import read_flight_recorder
from trainer.backend.groups import (
    collectives_begun,
    device_name,
    leave_replica_group,
    make_replica_group,
)
from trainer.backend.link_exchange import LINK_BYTES
from trainer.backend.link_test import BOUND_S, try_links
from trainer.backend.near_gpu import stay_near
from trainer.backend.node_network import NodeNetwork
from trainer.backend.origin import Origin, origin_of
from trainer.backend.rendezvous import Rendezvous, look_up_names
from trainer.backend.warmth import warm_device
from trainer.dryrun.machines import COMMUNICATOR_BYTES
from trainer.engine.engine import Engine
from trainer.errors import CompileError, GroupError, NonFiniteError, RateError, describe
from trainer.loop.compile_ahead import compile_ahead, rehearse
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.phases import COMPUTING
from trainer.loop.profiling import StepProfiler
from trainer.loop.steps import TrainLoop
from trainer.parallel.apply import warm_up
from trainer.parallel.compiled import keep_compiled
from trainer.parallel.layout import Slot
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import Meeting
from trainer.replication.lane_sums import LaneSums
from trainer.replication.replicas import CrossGroup
from trainer.tasks.causal_lm import PreparedCausalLM

OWN_FAULT_EXIT_CODE = 70

_CAUSES: dict[Origin, Cause] = {
    "group": COLLECTIVE,
    "memory": OUT_OF_MEMORY,
    "device": GPU_ERROR,
    "ecc": GPU_MEMORY,
    "assert": DEVICE_ASSERT,
    "compiler": COMPILER,
    "network": NETWORK,
    "storage": STORAGE,
    "data": DATA,
    "code": USER_ERROR,
}
"""What a worker is lost for, by the origin of its exception."""

_PAUSE_TICK_S = 0.01

_LEASES_OF_SILENCE = 2
"""By then the coordinator has written off the node of a peer that is not heard any more: the error
is not taken for this worker's own."""


class Worker:
    """One worker's life in a run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        if job.scaling.device == "cuda":
            see_own_gpus()
        threads = max(1, int(job.scaling.cpus_per_worker))
        torch.set_num_threads(threads)
        if job.train.compile != "off":
            keep_compiled(os.environ, threads)
        heartbeat = Heartbeat(collectives_begun, COMPUTING)
        rank = ray.train.get_context().get_world_rank()
        self.identity = Identity(
            worker=f"w{rank}-{uuid.uuid4().hex[:6]}",
            rank=rank,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            born_ticks=read_born_ticks(os.getpid()),
            heartbeat_fd=heartbeat.fd,
            device=device_name(job.scaling.device),
            stacks=offer_stacks(),
            recorder=offer_answers(partial(read_flight_recorder, job.scaling.device)),
            logs=output_files(),
            versions=find_versions(job),
        )
        job.coordinator.call(CoordinatorApi.hello, self.identity)
        self.run_sight = RunSight(job.paths)
        self.network = self.settle_on_gpu() if job.scaling.device == "cuda" else None
        # After the network: of what is set here, it would warn as of the cluster's.
        determinism.settle(job.train.determinism, job.scaling.device, os.environ)
        self.link = CoordinatorLink(self.identity, job, heartbeat)
        on_sigterm(self.link.terminating)
        self.engine: Engine | None = None
        """Without its model where the replica has broken; see `Engine.let_go_of_model`."""
        self.beside: SideBuild | None = None
        self.given_up: SideBuild | None = None
        """What it built beside the steps before; its thread may still be at it."""
        self.sums: LaneSums | None = None
        self.progress: Progress | None = None
        self.position: Progress | None = None
        """Where it is in the run: `progress`, or, without state, how far it follows."""
        self.built = self.generation = 0
        self.finished = False
        self.profiler: StepProfiler | None = None
        """Of the generation that it has trained in last."""
        look_up_names()
        job.task.warm_up()
        warm_up()
        with self.telling():
            warm_device(job.scaling.device)
        # What is there now stays: the collections of `leave_replica` need not look through it.
        gc.collect()
        gc.freeze()

    def settle_on_gpu(self) -> NodeNetwork:
        """Called before all that starts threads, which inherit the CPUs, and before NCCL reads its
        environment. Each worker asks its own machine: a cluster may have several kinds."""
        stay_near(str(torch.cuda.get_device_properties(0).uuid))
        return NodeNetwork(
            self.job.paths.nccl_log(self.identity.worker), allow_tcp=self.job.scaling.allow_tcp
        )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Where the device fails for good in the block, before this worker has a place: says so, as
        of a step, and exits. All else is raised."""
        try:
            yield
        except Exception as error:
            cause = _CAUSES[origin_of(error)]
            if not entry_of(cause).lasts:
                raise
            self.recover(describe(error), cause)

    def rehearse(self) -> None:
        """Compiles while nobody waits for this worker, and a spare before it has a place. A GPU
        gets its kernels so, too: in a first step the peers would wait while they are loaded. Not of
        a custom task, whose loss may not bear weights that are 0."""
        job = self.job
        kernels = job.scaling.device == "cuda" and isinstance(job.task, PreparedCausalLM)
        if job.train.compile != "off" or kernels:
            self.link.at_step(NO_STEP, "compile")
            with self.telling():
                rehearse(
                    job.task,
                    job.train,
                    lanes=job.lanes,
                    max_replicas=most_replicas(job.scaling.max_replicas),
                    device=job.scaling.device,
                )
            gc.freeze()  # as in the beginning: a compiler is many objects

    def run(self) -> None:
        """Works until the run is over.

        Raises:
            RunFailedError: the coordinator ended the run with an error.
        """
        self.rehearse()
        while True:
            answer = self.link.join(self.report())
            if isinstance(answer, Stop):
                self.stop(answer)
                return
            if isinstance(answer, Leave):
                self.leave_replica()
                continue
            failure = self.follow(answer)
            if failure is not None:  # by now its frames hold no process group any more
                self.recover(*failure)

    def follow(self, answer: Build | Run) -> tuple[str, Cause] | None:
        """Does what the coordinator asks. Where an exception ended it, returns what there is to say
        of it, and the cause where no peer is lost."""
        self.rendezvous = self.rendezvous_at(answer)
        try:
            self.drop_profile()
            if isinstance(answer, Build):
                self.build(answer)
            else:
                self.train(answer)
        except (CompileError, NonFiniteError, RateError) as error:
            # All workers would come to the same.
            generation = answer.generation if isinstance(answer, Run) else None
            self.link.fail(str(error), USER_ERROR, generation)
        except BaseException as error:  # SystemExit, too, and what is no Exception of a library
            return describe(error), _CAUSES[origin_of(error)]
        return None

    def rendezvous_at(self, answer: Build | Run) -> Rendezvous:
        """Where the groups that an answer asks for meet."""
        (host, port), health = answer.meet, self.job.health
        return Rendezvous(
            host=host,
            port=port,
            timeout_s=health.collective_timeout_s,
            silent_s=_LEASES_OF_SILENCE * health.node_timeout_s,
        )

    def report(self) -> Report:
        """What this worker has now."""
        progress, beside = self.progress, self.beside
        ready = beside is not None and beside.engine is not None
        return Report(
            identity=self.identity,
            built=beside.answer.formed if beside is not None and ready else self.built,
            rank=0 if self.engine is None else self.engine.rank,
            generation=self.generation,
            step=None if progress is None else progress.step,
            in_step=self.position is not None and self.position.in_step,
            last=None if progress is None else progress.last,
            finished=self.finished,
        )

    def stop(self, answer: Stop) -> None:
        """Leaves the run."""
        self.link.at_step(self.job.train.steps, "shutdown")
        self.link.close()
        self.drop()
        if answer.error is not None:
            raise RunFailedError(answer.error, answer.cause)

    def recover(self, detail: str, cause: Cause) -> None:
        """After an exception: joins again where a peer was lost, exits where it was this worker's
        own, or has left the state half stepped."""
        step = None if self.progress is None else self.progress.step
        half_stepped = self.progress is not None and self.progress.applying
        # It waits for the coordinator, which looks for a peer's loss: neither it nor its mates,
        # whose collectives do not end, stand still.
        self.link.mark(NO_STEP if step is None else step, "regroup")
        if self.link.trouble(step, detail, cause) and not half_stepped:
            self.leave_replica()
        else:
            self.exit(detail)

    def exit(self, detail: str) -> NoReturn:
        """Ends this process for an error of its own."""
        sys.stderr.write(f"{self.identity.worker} failed and leaves the run:\n{detail}")
        sys.stderr.flush()
        os._exit(OWN_FAULT_EXIT_CODE)

    def leave_replica(self) -> None:
        """Lets go of the replica's model and process group. The state stays, while there is any: it
        may be the last copy. What is built beside the steps is given up, and not waited for: it may
        read from storage that hangs, and all others wait for this worker."""
        self.give_up_beside()
        if self.engine is not None and self.built:
            self.engine.let_go_of_model()
        if self.progress is None:
            self.engine = None
        self.sums, self.link.injection.engine = None, self.engine
        self.built, self.finished = 0, False
        gc.collect()
        if self.given_up is None:  # else a group, where there is one, is its thread's, which leaves
            leave_replica_group()
        if self.job.scaling.device == "cuda" and torch.cuda.mem_get_info()[0] < COMMUNICATOR_BYTES:
            # NCCL, which comes next, has its memory from elsewhere. It waits for the device.
            torch.cuda.empty_cache()

    def give_up_beside(self) -> None:
        """Gives up what is built beside the steps; its thread comes to its end by itself."""
        if self.beside is not None:
            self.beside.give_up()
            self.beside, self.given_up = None, self.beside

    def close_beside(self) -> None:
        """Gives up what is built beside the steps, and waits until nothing is left of it, and of
        what was given up before."""
        self.give_up_beside()
        if self.given_up is not None:
            self.given_up.close()
        self.given_up = None

    def drop(self) -> None:
        """Lets go of everything."""
        self.progress = self.position = None
        self.leave_replica()

    def build(self, answer: Build) -> None:
        """Makes this worker's part of a new replica, without state, or with the one it holds. All
        workers of the replica do it at once. A custom task's model is not compiled here, as its
        loss may not bear weights of 0: that is done in its rehearsal, or else in its first step."""
        self.close_beside()  # a worker is in one replica's group at a time
        if answer.keep:
            self.leave_replica()
        else:
            self.drop()
        self.link.at_step(answer.step, "build")
        former = self.engine
        engine = self.make_engine(answer, former, self.link.leave_now)
        self.settle_in(engine, former, answer)
        compiles = self.job.train.compile != "off" and isinstance(self.job.task, PreparedCausalLM)
        if compiles and answer.kept == "none":
            self.link.at_step(answer.step, "compile")
            compile_ahead(engine, self.job.lanes)

    def make_engine(
        self, answer: Build, former: Engine | None, leave_now: Callable[[], bool]
    ) -> Engine:
        """This worker's engine in a new replica, as the heir of `former` if there is one. That its
        machine sees what training reads shows here, where nobody heals or waits for it yet.

        Raises:
            StorageNotSeenError: see `RunSight.check` and `PreparedCausalLM.open_tokens`.
        """
        self.run_sight.check()
        if isinstance(self.job.task, PreparedCausalLM):
            self.job.task.open_tokens()
        train, device = self.job.train, self.job.scaling.device
        mesh = make_replica_group(
            self.rendezvous_at(answer),
            replica_prefix(answer.formed),
            rank=answer.rank,
            dims=train.parallel.dims,
            device=device,
            leave_now=leave_now,
        )
        if self.network is not None:
            self.network.check()
        return Engine(
            self.job.task,
            train,
            slot=Slot(replica=answer.replica, rank=answer.rank, dims=train.parallel.dims),
            mesh=mesh,
            device=device,
            max_replicas=most_replicas(self.job.scaling.max_replicas),
            heir_of=former,
        )

    def make_sums(self, engine: Engine) -> LaneSums:
        """Buffers for the gradients of `engine`."""
        replicas, traced = self.job.scaling.max_replicas, self.job.traces_gradients
        return engine.make_sums(self.job.lanes, replicas, traced=traced)

    def settle_in(self, engine: Engine, former: Engine | None, answer: Build) -> None:
        """From now on `engine`, of the replica that `answer` told to build, is this worker's."""
        if former is not None:
            engine.take_over(former)
        self.engine, self.built = engine, answer.formed
        self.sums = None  # what the host has pinned for it serves the next one
        self.sums = self.make_sums(engine)
        self.link.injection.engine = engine

    # -- beside the steps --------------------------------------------------------------------------

    def build_beside(self, answer: Build) -> None:
        """Begins to build this worker's part of a new replica, with the state that it follows
        with."""
        former = self.engine
        assert former is not None
        self.beside = SideBuild(
            answer,
            lambda given_up: self.make_engine(answer, former, given_up),
            lambda: self.link.built(answer.formed),
            lambda detail, origin: self.fail_beside(answer, detail, _CAUSES[origin]),
            self.link.builds_beside,
            after=self.given_up,
        )
        self.given_up = None

    def fail_beside(self, answer: Build, detail: str, cause: Cause) -> None:
        """As `recover`, of what was built beside the steps. Called by its thread."""
        if not self.link.trouble(answer.step, detail, cause, answer.formed):
            self.exit(detail)

    def tend_beside(self, run: Run) -> None:
        """What is built beside the steps is begun, given up, or, where its replica enters the
        roster, this worker's place from now on. Waits for no build: all others wait for this worker
        in the group across replicas."""
        if run.follows and self.built:
            self.leave_replica()
        beside = self.beside
        if beside is not None and beside.answer.formed == run.formed:
            assert beside.engine is not None
            self.beside = None
            self.settle_in(beside.engine, self.engine, beside.answer)
        elif beside is not None and (run.build is None or run.build.formed != beside.answer.formed):
            self.give_up_beside()
        if run.build is not None and self.beside is None:
            self.build_beside(run.build)

    def train(self, run: Run) -> None:
        """This worker's part in one generation: gets its state up to date, then trains."""
        self.tend_beside(run)
        assert self.engine is not None
        self.generation = run.generation
        self.link.at_step(run.step, "regroup")
        if run.pause_s:
            self.try_links(run)
            self.pause(run.pause_s)
        if run.restore or run.lacks_state:
            self.progress = None
        if run.restore and self.sums is not None:
            self.sums.clear()  # the same step may have other samples now
        cross = self.make_cross_group(run, self.engine)
        heal: Source | Newcomer | None = None
        loop: TrainLoop | None = None
        try:
            self.catch_up(run, cross)
            if run.restore:
                self.progress = restore(self.job, run, self.engine, cross, self.identity)
                if self.progress is None:
                    return
            heal = self.begin_heal(run, self.engine)
            self.position = self.progress or Progress(step=run.step, last=run.commit)
            self.profiler = self.make_profiler(run)
            loop = self.make_loop(run, cross, self.position, heal)
            if run.position < run.savers:
                self.link.saves.prepare(run, self.engine)
            self.finished = loop.run() == "finished"
        finally:
            cross.close()
            if heal is not None:
                heal.close()
            if loop is not None and loop.has_state():
                self.progress = self.position
        if self.finished and self.progress is not None and not run.follows:
            self.finished = self.finish(run)

    def pause(self, seconds: float) -> None:
        """Waits, unless it is called away."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.link.leave_now():
            time.sleep(_PAUSE_TICK_S)

    def try_links(self, run: Run) -> None:
        """The groups of the rosters before this one have failed, with nobody lost: tries the
        connections between their members, and tells what it finds. Who is called away meanwhile,
        or does not meet the others, tells nothing."""
        with contextlib.suppress(GroupError, OSError):
            short = try_links(
                self.rendezvous,
                f"links/{run.generation}/{run.rank}",
                rank=run.position,
                size=len(run.lanes_of(run.rank)),
                leave_now=self.link.leave_now,
            )
            self.link.links_tested(
                LinkTest(
                    generation=run.generation, short=short, of_bytes=LINK_BYTES, bound_s=BOUND_S
                )
            )

    def make_cross_group(self, run: Run, engine: Engine) -> CrossGroup:
        """The group over this worker's (shard, tensor) in all replicas."""
        return CrossGroup(
            self.rendezvous,
            cross_prefix(run.generation, engine.rank),
            lanes=run.lanes_of(run.rank),
            total_lanes=self.job.lanes,
            rank=run.position,
            device=self.job.scaling.device,
            leave_now=self.link.leave_now,
            on_lost=self.link.cross_lost,
        )

    def catch_up(self, run: Run, cross: CrossGroup) -> None:
        """Applies the last step where others saw it committed and this worker did not: it has the
        gradient. What is due after it the others have begun in a roster that is gone: a save is
        asked for again, an evaluation that a fault comes into is not made up for. At the end, `run`
        sees to both."""
        progress = self.progress
        if progress is None or run.commit is None or run.restore or progress.step != run.step - 1:
            return
        self.make_loop(run, cross, progress, None).finish_step(run.commit)
        self.link.mark(run.step, "regroup")  # as of those who had nothing to catch up with

    def begin_heal(self, run: Run, engine: Engine) -> Source | Newcomer | None:
        """Starts to send this worker's state to newcomers, or to receive it as one."""
        own, source = run.position, run.position
        if run.lacks_state:
            source = run.source_of(own) or 0
        takers = [h.position for h in run.heals if h.source == source and run.rank in h.ranks]
        if not takers:
            return None
        self.link.at_step(run.step, "heal_source" if own == source else "heal_target")
        meeting = Meeting(
            rendezvous=self.rendezvous,
            prefix=f"heal/{run.generation}/{engine.rank}/{source}",
            secret=self.job.secret,
            newcomers=len(takers),
            bytes_per_s=self.job.health.heal_bytes_per_s,
        )
        if own != source:
            clip_norm = self.job.train.optimizer.clip_norm
            return Newcomer(engine, meeting, number=takers.index(own), clip_norm=clip_norm)
        assert self.progress is not None
        return Source(engine, self.progress.skipped_in_a_row, meeting)

    def make_loop(
        self,
        run: Run,
        cross: CrossGroup,
        progress: Progress,
        heal: Source | Newcomer | None,
    ) -> TrainLoop:
        """The loop of this generation."""
        assert self.engine is not None
        if self.sums is None:  # a follower has no lanes
            self.sums = self.make_sums(self.engine)
        joins = run.source_of(run.position) is not None
        return TrainLoop(
            self.engine,
            cross,
            self.sums,
            lanes=run.lanes_of(run.rank)[run.position],
            progress=progress,
            config=LoopConfig(
                lanes=self.job.lanes,
                save_every=self.job.checkpoint.fixed_steps,
                snapshot_every=self.job.checkpoint.memory_every,
                compare_every=self.job.health.compare_every,
                max_nonfinite_steps=self.job.health.fatal_nonfinite_steps,
                skips=run.skips,
                until=run.until,
                witness_every=self.job.witness_every,
                generation=run.generation,
            ),
            link=self.link,
            source=heal if isinstance(heal, Source) else None,
            newcomer=heal if isinstance(heal, Newcomer) else None,
            part="remnant" if run.follows else "joining" if joins else "whole",
            followers=run.followers,
            all_evaluate=not run.heals and not any(run.followers),
            profiler=self.profiler,
        )

    def make_profiler(self, run: Run) -> StepProfiler | None:
        """Looks at the steps that are to be profiled, on the lead."""
        steps = self.job.train.profile
        if steps is None or not run.lead:
            return None
        return StepProfiler(
            steps,
            self.job.paths.profile,
            self.identity.worker,
            on_cuda=self.job.scaling.device == "cuda",
            tell=self.link.profiled,
        )

    def drop_profile(self) -> None:
        """Lets go of a profile in which the generation before ended. Not at its end: a worker whose
        own code raised tells that at once, or a peer that did, too, explains it."""
        if self.profiler is not None and self.profiler.running:
            self.link.at_step(NO_STEP if self.position is None else self.position.step, "profile")
            self.profiler.drop()
        self.profiler = None

    def finish(self, run: Run) -> bool:
        """Hands in everything that the run still needs from this worker. Returns False where a
        fault calls it away before."""
        assert self.engine is not None
        self.link.at_step(run.until, "wait")
        if not self.link.saves.wait():
            return False
        self.link.outbox.flush()
        where = " ".join(f"{name} {at}" for name, at in self.engine.slot.coordinates.items())
        self.link.compare(where, self.engine.state.digest())
        return True
