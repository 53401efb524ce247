"""A run goes on from its checkpoint in two levels, out of them, and with offloading switched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpointing import open_store
from tests.support.data_plane import Run, WorkerResult, assert_same_bits, commit_save, run_in_turn
from tests.support.tiny import tiny_task, tiny_train, write_text
from trainer.config import OffloadConfig, OptimizerConfig, ParallelConfig

HALF, STEPS = 2, 4
LAYOUTS = {
    "flat": ParallelConfig(shard=4),
    "two levels": ParallelConfig(shard=4, workers_per_node=2),
}
RESUMES = [
    ("two levels", "two levels, offloaded"),
    ("two levels, offloaded", "two levels"),
    ("two levels", "flat"),
    ("flat", "two levels"),
]
"""How a run is laid out before it is stopped, and after."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[object, list[WorkerResult]]:
    """Of each run that is not stopped, by its layout, and of each that went on."""
    root = tmp_path_factory.mktemp("resumed")
    text = write_text(root / "text")
    # A constant rate: that of a step does not depend on where the run ends.
    optimizer = OptimizerConfig(lr=1e-2, min_lr_ratio=1.0, warmup_steps=0, clip_norm=0.5)
    plain = tiny_train(text, task=tiny_task(text), optimizer=optimizer)
    prepared = plain.task.prepare(plain, str(root / "cache"))

    def run_of(name: str, steps: int, **more: object) -> Run:
        layout, _, offloaded = name.partition(", ")
        offload = OffloadConfig(horizon=1, least_bytes=1) if offloaded else None
        train = replace(plain, parallel=LAYOUTS[layout], offload=offload, steps=steps)
        return Run(task=prepared, train=train, replicas=1, lanes=2, **more)  # type: ignore[arg-type]

    names = sorted({before for before, _ in RESUMES})
    stopped = [run_of(name, HALF, saves=True) for name in names]
    found = run_in_turn([*stopped, *(run_of(layout, STEPS) for layout in LAYOUTS)])
    for name, workers in zip(names, found, strict=False):
        commit_save(workers, open_store(root / name), HALF)
    goes_on = [run_of(after, STEPS, resumes=str(root / before)) for before, after in RESUMES]
    unstopped = zip(LAYOUTS, found[len(names) :], strict=True)
    return dict([*unstopped, *zip(RESUMES, run_in_turn(goes_on), strict=True)])


@pytest.mark.parametrize(("before", "after"), RESUMES)
def test_a_resumed_run_is_as_one_that_was_not_stopped(
    results: dict[object, list[WorkerResult]], before: str, after: str
) -> None:
    """To the bit in one layout; between two, float32 sums have another order."""
    expected, found = results[after.partition(", ")[0]], results[before, after]
    same = before.partition(", ")[0] == after.partition(", ")[0]
    for one, other in zip(expected, found, strict=True):
        assert len(other.losses) == STEPS - HALF
        if same:
            rest = replace(one, losses=one.losses[HALF:], norms=one.norms[HALF:])
            assert_same_bits(rest, other)
        assert other.losses == pytest.approx(one.losses[HALF:], rel=5e-5)
        assert other.digests == one.digests[HALF:]
