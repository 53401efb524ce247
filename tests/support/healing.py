"""What tests of heals share: engines that a heal takes milliseconds for, and their steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from tests.support import watching
from trainer.backend.groups import make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OptimizerConfig, TrainConfig
from trainer.engine.engine import Engine
from trainer.parallel.layout import ParallelDims, Slot
from trainer.parallel.mesh import ReplicaMesh
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_wire import Meeting
from trainer.replication.step_commit import Commit
from trainer.tasks.custom import CustomTask

DEADLINE_S = 30.0
wait_until = partial(watching.wait_until, deadline_s=DEADLINE_S)
SECRET = b"of the tests' run"
STATE_BYTES = 3 * 4 * (3 * 2 + 2)


def make_engine(mesh: ReplicaMesh) -> Engine:
    """A worker's, without state."""
    task = CustomTask(
        build_model=lambda: nn.Linear(3, 2), loss_function=lambda m, b: (m(b).sum(), 1), dataset=[0]
    )
    settings = TrainConfig(
        task=task, steps=9, global_batch=1, seed=5, optimizer=OptimizerConfig(lr=0.1, clip_norm=0.5)
    )
    slot = Slot(replica=0, rank=0, dims=ParallelDims())
    return Engine(task, settings, slot=slot, mesh=mesh, device="cpu", max_replicas=1)


def make_mesh(meet: Rendezvous, replica: str = "replica") -> ReplicaMesh:
    """A replica of this worker alone."""
    return make_replica_group(meet, replica, rank=0, dims=ParallelDims(), device="cpu")


def meeting_at(meet: Rendezvous, prefix: str = "heal") -> Meeting:
    """Of a source and one newcomer."""
    return Meeting(rendezvous=meet, prefix=prefix, secret=SECRET)


def slowly(meeting: Meeting) -> Meeting:
    """One whose source sends the first block, and the next one in a month."""
    return replace(meeting, bytes_per_s=1e-5)


def commit_of(step: int) -> Commit:
    """A step whose gradient's norm is 2."""
    return Commit(step=step, loss=1.0, grad_norm=2.0, tokens=4, digests=b"", boundary=False)


def step_both(giver: Engine, newcomer: Newcomer, taker: Engine, step: int) -> None:
    """A committed step: applied by one, kept by the other."""
    for engine in (giver, taker):
        engine.gradient.fill_(step + 1.0)
    giver.apply(step, scale=commit_of(step).scale(0.5))
    newcomer.keep(commit_of(step))


def failure_of(newcomer: Newcomer) -> str:
    """Waits for the reason why the state will not arrive."""
    reasons: list[str] = []

    def failed() -> bool:
        reasons.extend(filter(None, [newcomer.take_failure()]))
        return bool(reasons)

    wait_until(failed)
    return reasons[0]
