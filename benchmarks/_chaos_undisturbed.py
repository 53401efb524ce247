"""What a run of the soak is held against: one replica of the same degrees that is asked for the
same features, without faults and without a cluster, on processes of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._chaos import LANES, Layout, Schedule
from benchmarks._chaos_features import Features
from benchmarks._chaos_trainer import make_undisturbed
from checkpointing import tensors_sha256
from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from trainer.config import TrainConfig
from trainer.loop.samples import samples_sha256


@dataclass(frozen=True, kw_only=True)
class Whole:
    """How a run ends that nothing happens to."""

    params: str
    """SHA-256 of the final parameters, as of a checkpoint's."""
    samples: str
    """SHA-256 of the committed samples."""
    losses: list[float]
    """Of every step."""


class Undisturbed:
    """The runs that others are held against, each made once.

    Args:
        text: what is learned.
        cache: directory for its tokens.
    """

    def __init__(self, text: Path, cache: Path) -> None:
        self._text, self._cache = text, cache
        self._made: dict[tuple[Layout, Features | None], Whole] = {}

    def of(self, schedule: Schedule) -> Whole:
        """How the run of a schedule is to end."""
        kind = replace(schedule.layout, replicas=1), schedule.features
        if kind not in self._made:
            self._made[kind] = train_undisturbed(make_undisturbed(self._text, *kind), self._cache)
        return self._made[kind]


def train_undisturbed(train: TrainConfig, cache: Path) -> Whole:
    """Trains one replica. Raises what one of its workers does."""
    task = train.task.prepare(train, str(cache))
    workers = run_layout(task, train, replicas=1, lanes=LANES)
    for worker in workers:
        if not isinstance(worker, WorkerResult):
            raise worker
    (_, _, part), *_ = workers[0].local.values()
    params = {f"param/{n}": p.to(part.dtype) for n, p in full_parameters(workers).items()}
    return Whole(
        params=tensors_sha256(sorted(params.items())),
        samples=samples_sha256(
            train, LANES, len(task.train_data()), list(enumerate(workers[0].digests))
        ),
        losses=workers[0].losses,
    )
