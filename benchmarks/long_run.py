"""A run of a million steps and ten thousand losses: the coordinator's memory, and its records.

    python -m benchmarks.long_run [--steps 1000000] [--incidents 10000]

Takes about ten minutes. The real Coordinator and Membership run on this process's event loop, with
simulated workers: two replicas of one each, and a spare. After every hundred steps a worker is
lost, the spare heals in its place, and another spare comes. Then the records that this wrote are
read, as by a coordinator that is started anew in the middle of the run, and at its end.

coordinator_rss_growth: bytes by which this process has grown from a tenth of the run to its end.
replay_s: what a coordinator that is started anew reads before it can work. report_s: from the
records to `report.json`, `report.txt` and `run.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import time
from pathlib import Path

from benchmarks._common import end_properly, print_result, say, scratch, show_table
from benchmarks._processes import resident_bytes
from benchmarks.coordinator import LocalCoordinator, SimulatedWorker
from checkpointing import CheckpointConfig
from elastic import HealthConfig
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.replay import replay
from elastic.membership.decisions import GroupConfig
from elastic.protocol import events
from elastic.protocol.messages import Build, Report, Run
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.conclusion import conclude
from elastic.reporting.event_log import present_start, read_events
from trainer.loop.samples import Ledger
from trainer.parallel.layout import ParallelDims
from trainer.replication.step_commit import Commit

REPLICAS, LANES = 2, 2
LEDGER = Ledger(seed=0, global_batch=LANES, lanes=LANES, samples=1000)


class LongWorker(SimulatedWorker):
    """Follows every call, and has the state as soon as it is a newcomer."""

    step = 0
    """Steps that the run has committed; all of them have seen each."""

    def __init__(self, coordinator: LocalCoordinator, number: int) -> None:
        super().__init__(coordinator, number)
        self.run: Run | None = None
        self.has_state = False

    async def live(self) -> None:
        """Joins, builds, heals, and takes part in one roster after the other."""
        await self.coordinator.hello(self.identity)
        self.tasks.append(asyncio.create_task(self.watch()))
        while True:
            answer = await self.coordinator.join(self.report())
            if isinstance(answer, Build):
                self.built, self.has_state = answer.formed, answer.keep
                continue
            assert isinstance(answer, Run), answer
            self.run, self.generation = answer, answer.generation
            if answer.lacks_state:
                await self.coordinator.caught_up(self.identity.worker, answer.generation, 1, 0.0, 1)
            self.has_state = True
            await self.called.wait()
            self.called.clear()
            self.run = None

    def report(self) -> Report:
        """What it has now."""
        if not self.has_state:
            return Report(identity=self.identity, built=self.built, generation=self.generation)
        step = LongWorker.step
        last = Commit(
            step=step - 1, loss=2.0, grad_norm=1.0, tokens=2, digests=bytes(16), boundary=False
        )
        return Report(
            identity=self.identity,
            built=self.built,
            generation=self.generation,
            step=step,
            last=last if step else None,
        )


class LongRun:
    """The workers of the run, and what happens to them."""

    def __init__(self, coordinator: LocalCoordinator) -> None:
        self._coordinator, self._numbers = coordinator, itertools.count()
        self._workers: list[LongWorker] = []
        for _ in range(REPLICAS + 1):
            self._start_one()

    async def whole(self) -> LongWorker:
        """Waits until all replicas are at work. Returns the lead."""
        while True:
            at_work = [w for w in self._workers if w.run is not None]
            lead = next((w for w in at_work if w.run is not None and w.run.lead), None)
            if lead is not None and len(at_work) == REPLICAS and not _heals(lead):
                return lead
            await asyncio.sleep(0)

    async def train(self, steps: int) -> None:
        """So many steps are committed and recorded."""
        generation = (await self.whole()).generation
        first = LongWorker.step
        LongWorker.step += steps
        records = [
            events.StepRecord(
                step=step,
                loss=2.0,
                grad_norm=1.0,
                lr=1e-3,
                tokens=2,
                time=time.time(),
                generation=generation,
                replicas=REPLICAS,
                sample_digests=LEDGER.digests(step),
            )
            for step in range(first, first + steps)
        ]
        await self._coordinator.record(records, [])

    async def lose_one(self) -> None:
        """The lead's process ends, and a spare's begins."""
        lost = await self.whole()
        self._workers.remove(lost)
        await lost.cancel()
        await self._coordinator.worker_lost(lost.identity.worker)
        self._start_one()

    async def end(self) -> None:
        """Nobody works any more."""
        for worker in self._workers:
            await worker.cancel()

    def _start_one(self) -> None:
        worker = LongWorker(self._coordinator, next(self._numbers))
        worker.tasks.append(asyncio.create_task(worker.live()))
        self._workers.append(worker)


def _heals(worker: LongWorker) -> bool:
    return worker.run is None or bool(worker.run.heals) or len(worker.run.lanes) < REPLICAS


async def live_through(config: CoordinatorConfig, incidents: int) -> dict[str, float]:
    """The whole run. Returns the growth of this process and how long it took."""
    coordinator = LocalCoordinator(config)
    run = LongRun(coordinator)
    each, began_s, at_first = config.groups.steps // incidents, time.perf_counter(), 0
    for incident in range(incidents):
        if incident == incidents // 10:
            gc.collect()
            at_first = resident_bytes()
        await run.train(each)
        await run.lose_one()
    await run.whole()
    gc.collect()
    grown = resident_bytes() - at_first
    await run.end()
    await coordinator.end("finished", None)
    return {"coordinator_rss_growth": grown, "lived_s": time.perf_counter() - began_s}


def coordinator_config(steps: int, directory: Path) -> CoordinatorConfig:
    """Of the run."""
    return CoordinatorConfig(
        groups=GroupConfig(
            max_replicas=REPLICAS,
            min_replicas=1,
            dims=ParallelDims(),
            lanes=LANES,
            steps=steps,
            start_workers=REPLICAS + 1,
            max_regroups_without_progress=8,
        ),
        paths=RunPaths(root=directory),
        identity=RunIdentity(id="r"),
        prefix="benchmark/",
        # A call waits so long for those who do not follow it; here an hour passes in a second.
        health=HealthConfig(regroup_timeout_s=2.0),
        checkpoint=CheckpointConfig(every_steps=None),
        generation=0,
        restore_step=0,
        snapshot=None,
        faults=(),
        ledger=LEDGER,
        started=events.RunStarted(
            time=time.time(), name="long", layout={}, steps=steps, start_step=0, versions={}
        ),
    )


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the run")
    parser.add_argument("--incidents", type=int, default=10_000, help="workers lost in it")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_arguments()
    end_properly()
    with scratch("long_run") as directory:
        config = coordinator_config(options.steps, directory)
        found = asyncio.run(live_through(config, options.incidents))
        say(f"lived through: {found}")
        began_s = time.perf_counter()
        known = replay(
            config.paths, present_start(read_events(config.paths.events), config.started.time), 0
        )
        found["replay_s"] = time.perf_counter() - began_s
        assert known.recorded == options.steps, known.recorded
        say(f"replayed in {found['replay_s']:.1f} s")
        began_s = time.perf_counter()
        report = conclude(config.paths)
        found["report_s"] = time.perf_counter() - began_s
        assert (report.steps, len(report.incidents)) == (options.steps, options.incidents)
        sizes = {
            path.name: path.stat().st_size for path in (config.paths.events, config.paths.steps)
        }
    show_table("a long run", {"": found})
    print_result({"steps": options.steps, "incidents": options.incidents, **found, "bytes": sizes})


if __name__ == "__main__":
    main()
