"""Settings of the user's own, as they are in the program that has started a run and in the next one
that attaches to it: classes of `__main__` cross by value, so they are two classes of one name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from elastic import ConfigError, OptimizerConfig, ParallelConfig, TrainConfig
from elastic.driver.running import check_same
from elastic.protocol.job import Job
from elastic.protocol.run_paths import RunPaths
from tests.support.run_plan import run_plan


def program() -> dict[str, Any]:
    """The classes of one program, made anew in each process that runs it."""

    @dataclass(frozen=True)
    class InverseRoot:
        lr: float

        def rate(self, step: int, steps: int) -> float:
            return self.lr / (step + 1) ** 0.5

    class Freeze:
        def __init__(self, prefix: str) -> None:
            self.prefix = prefix

        def convert(self, model: Any, source: Any) -> tuple[Any, Any]:
            return model, source

    class Wrap(Freeze):
        pass

    return locals()


def going_on(tmp_path: Path, train: TrainConfig) -> Job:
    job = run_plan(RunPaths(root=tmp_path / "run"), coordinator=None).job  # type: ignore[arg-type]
    return replace(job, train=train)


def attaches(job: Job, train: TrainConfig) -> None:
    check_same(job, train=train, scaling=job.scaling, checkpoint=job.checkpoint, health=job.health)


def config(names: dict[str, Any], *, lr: float = 0.01, converter: str = "Freeze") -> TrainConfig:
    return TrainConfig(
        task=None,
        steps=1,
        global_batch=1,
        optimizer=OptimizerConfig(schedule=names["InverseRoot"](lr=lr)),
        converters=(names[converter]("model.embed"),),
    )


def test_the_same_program_attaches(tmp_path: Path) -> None:
    started, again = config(program()), config(program())
    assert started != again
    attaches(going_on(tmp_path, started), again)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"lr": 0.02}, r"optimizer = .*InverseRoot\(lr=0.02\)"),
        ({"converter": "Wrap"}, "converters"),
    ],
)
def test_another_number_or_class_does_not(
    tmp_path: Path, other: dict[str, Any], field: str
) -> None:
    job = going_on(tmp_path, config(program()))
    with pytest.raises(ConfigError, match=f"train.{field}"):
        attaches(job, config(program(), **other))


@pytest.mark.parametrize(
    "other",
    [
        {"steps": 2},
        {"micro_batch": 1},
        {"parallel": ParallelConfig(shard=2)},
        {"converters": ()},
        {"optimizer": OptimizerConfig(lr=1e-3)},
    ],
)
def test_other_settings_of_ours_are_told_by_name(tmp_path: Path, other: dict[str, Any]) -> None:
    train = config(program())
    (name,) = other
    there = rf"elastic attach {tmp_path}/run`, which asks for no settings"
    with pytest.raises(ConfigError, match=f"train.{name} = .*going on, with.*{there}"):
        attaches(going_on(tmp_path, train), replace(train, **other))
