"""A run whose workers are killed ends with the same weights and samples as one that nothing
happened to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny import Outcome, fit, tiny_trainer
from tests.support.watching import check_replicas_equal, events_of

STEPS = 80
EARLY, MIDDLE, LAST = 1, 30, STEPS - 1

Undisturbed = Callable[[int, int], Outcome]


@pytest.fixture(scope="module")
def undisturbed(cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The outcome of the layout 2 x shard x tensor when nothing happens, run once each."""
    storage = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def run(shard: int, tensor: int) -> Outcome:
        name = f"{shard}x{tensor}"
        return fit(tiny_trainer(text, storage, name=name, shard=shard, tensor=tensor, steps=STEPS))

    return run


def check_equal(broken: Outcome, root: Path, whole: Outcome, faults: int) -> None:
    assert broken.report["faults_fired"] == faults
    assert broken.report["lost_steps"] == 0
    check_replicas_equal(broken.report, root)
    assert broken.samples == whole.samples
    assert broken.losses == whole.losses
    assert broken.params == whole.params


SOAK = pytest.mark.soak


@SOAK
@pytest.mark.parametrize(
    ("shard", "tensor", "steps"),
    [
        (1, 1, (EARLY, MIDDLE)),
        (2, 1, (EARLY,)),
        (1, 2, (MIDDLE,)),
        (2, 1, (MIDDLE,)),
        (1, 2, (EARLY,)),
    ],
)
def test_every_worker_killed(
    undisturbed: Undisturbed,
    text: Path,
    tmp_path: Path,
    shard: int,
    tensor: int,
    steps: tuple[int, ...],
) -> None:
    """Kills every worker once from each of `steps` on, each when the recovery from the last kill is
    over, and one more in the last step. With `min_replicas` 2 the run waits to be whole again, so
    that every kill finds its target."""
    kills = [(step, w) for step in steps for w in range(2 * shard * tensor)] + [(LAST, 0)]
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            shard=shard,
            tensor=tensor,
            min_replicas=2,
            spares=3 * shard * tensor,
            faults=",".join(f"kill@{step}:{worker}" for step, worker in kills),
            steps=STEPS,
        )
    )
    check_equal(broken, tmp_path / "run", undisturbed(shard, tensor), faults=len(kills))


@pytest.mark.parametrize(
    ("shard", "tensor"),
    [(1, 1), pytest.param(2, 1, marks=SOAK), pytest.param(1, 2, marks=SOAK)],
)
def test_goes_on_with_one_replica_and_grows_back(
    undisturbed: Undisturbed, text: Path, tmp_path: Path, shard: int, tensor: int
) -> None:
    """Without a spare and without waiting: the other replica takes over the lanes at once."""
    broken = fit(
        tiny_trainer(
            text, tmp_path, shard=shard, tensor=tensor, faults=f"kill@{MIDDLE}", steps=STEPS
        )
    )
    check_equal(broken, tmp_path / "run", undisturbed(shard, tensor), faults=1)
    assert broken.report["repeated_steps"] == 1


@SOAK
@pytest.mark.parametrize("kill", [f"kill@{MIDDLE}:1+6", f"kill@{MIDDLE}.forward:0+7"])
def test_both_replicas_of_four_lose_a_worker(
    undisturbed: Undisturbed, text: Path, tmp_path: Path, kill: str
) -> None:
    """What is left makes one replica of the two. In both, survivors wait for survivors: each must
    let go of its process group for the others to hear of it."""
    broken = fit(tiny_trainer(text, tmp_path, shard=4, faults=kill, steps=STEPS))
    check_equal(broken, tmp_path / "run", undisturbed(4, 1), faults=2)
    lost = events_of(tmp_path / "run", "worker_lost")
    assert [event["cause"] for event in lost] == ["crash", "crash"]
