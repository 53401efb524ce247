"""A replica of one worker through generations that a test calls: what `elastic/worker/worker.py`
does with the trainer, and a task so small that a step takes milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.data_plane import make_engine
from tests.support.fabric import Fabric, FabricGroup
from tests.support.processes import PATIENCE
from tests.support.quiet_link import QuietLink
from trainer.backend.groups import abort_groups, replica_connections
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.steps import Outcome, TrainLoop
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.replication.replicas import CrossGroup
from trainer.replication.step_commit import Commit
from trainer.tasks.custom import CustomTask

LANES, REPLICAS = 2, 2
BUCKET_BYTES = 1024
"""So small that the model has several."""


def build_model() -> nn.Module:
    """Some thousand parameters."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 16))


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Its outputs should be one."""
    out = model(batch)
    return (out - 1).square().sum(), out.numel()


def small_task() -> CustomTask:
    """Sixty-four samples to learn from."""
    samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return CustomTask(build_model=build_model, loss_function=loss_of, dataset=samples)


def small_train(steps: int, *, shard: int = 1) -> TrainConfig:
    """A short run of it."""
    return TrainConfig(
        task=small_task(),
        steps=steps,
        global_batch=8,
        lanes=LANES,
        parallel=ParallelConfig(shard=shard),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1, clip_norm=0.5),
        bucket_bytes=BUCKET_BYTES,
        seed=3,
    )


def end_groups_at_the_call(port: int, *, replica: bool) -> threading.Thread:
    """A thread that does what a worker's watch does at the call to leave generation 1, whatever the
    others are in."""

    def hear() -> None:
        dist.TCPStore("127.0.0.1", port).wait(["fault 1"], PATIENCE)
        abort_groups(replica=replica_connections() if replica else None)

    ear = threading.Thread(target=hear, daemon=True)
    ear.start()
    return ear


class Member(QuietLink):
    """One process of a run, which is its own link: it hears calls through the store.

    Args:
        fabric: what the run is on.
        port: of the store, on this machine.
        number: its own among all that ever take part.
        steps: of the run.
        replicas: of it, at most.
    """

    def __init__(
        self, fabric: Fabric, port: int, *, number: int, steps: int, replicas: int = REPLICAS
    ) -> None:
        self.fabric = fabric
        self.meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
        self.store = dist.TCPStore("127.0.0.1", port)
        self.engine = make_engine(
            number,
            self.meet,
            small_task(),
            small_train(steps),
            device=fabric.device,
            replicas=replicas,
        )
        self.sums = self.engine.make_sums(LANES, replicas)
        self.progress = Progress()
        self.losses: dict[int, float] = {}
        self.generation = 0
        self.newcomer: Newcomer | None = None
        self._caught_up = False

    def run(
        self,
        generation: int,
        lanes: Sequence[tuple[int, ...]],
        *,
        position: int = 0,
        heal: Source | Newcomer | None = None,
        group: Callable[..., CrossGroup] = FabricGroup,
    ) -> Outcome:
        """Trains in one generation, at `position` of the replicas that have `lanes`, which meet in
        a `group`."""
        self.generation, self._caught_up = generation, False
        self.newcomer = heal if isinstance(heal, Newcomer) else None
        self.cross = cross = group(
            self.fabric,
            self.meet,
            f"cross/{generation}/{len(lanes)}",
            lanes=lanes,
            total_lanes=LANES,
            rank=position,
            leave_now=self.leave_now,
        )
        loop = TrainLoop(
            self.engine,
            cross,
            self.sums,
            lanes=lanes[position],
            progress=self.progress,
            config=LoopConfig(
                lanes=LANES,
                save_every=None,
                compare_every=None,
                max_nonfinite_steps=1,
                until=self.engine.train_config.steps,
                generation=generation,
            ),
            link=self,
            source=heal if isinstance(heal, Source) else None,
            newcomer=self.newcomer,
        )
        try:
            return loop.run()
        finally:
            cross.close()
            if heal is not None:
                heal.close()
            assert loop.has_state()

    def leave_now(self) -> bool:
        """See Link."""
        return self.store.check([f"fault {self.generation}"])

    def leave_at_boundary(self) -> bool:
        """See Link. Once the newcomer has its state, lanes are dealt afresh."""
        return self._caught_up

    def caught_up(self, newcomer: Newcomer) -> None:
        """See Link."""
        self._caught_up = True

    def committed(self, commit: Commit, lr: float, applied: bool) -> None:
        """See Link."""
        assert applied
        self.losses[commit.step] = commit.loss

    def outcome(self) -> dict[str, Any]:
        """What is compared of two runs."""
        return {"digest": self.engine.state.digest(), "losses": sorted(self.losses.items())}


def train_alone(fabric: Fabric, port: int, *, number: int, steps: int) -> Member:
    """The undisturbed run: one replica has all lanes."""
    member = Member(fabric, port, number=number, steps=steps)
    assert member.run(0, [(0, 1)]) == "finished"
    return member
