"""The trainer's features with each other: what a case of the matrix computes is what one process
computes in plain PyTorch, tensor by tensor; and what is promised to change no bit changes none.

`make test` has every value once, the soak tier every pair of values and every triple."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.covering import Case
from tests.support.data_plane import Run, WorkerResult, full_gradients, run_in_turn
from tests.support.gradients import FirstStep, plain_first_step
from tests.support.matrix import FEATURES, LANES, REFUSED, bare, cases, layout_of, train_of
from tests.support.te_stand_in import STAND_INS, OnCpu
from tests.support.tiny import write_text
from trainer.config import ParallelConfig, TrainConfig
from trainer.engine.build import build_model
from trainer.errors import ConfigError
from trainer.float8.config import Float8
from trainer.tasks.causal_lm import PreparedCausalLM

NAMES = {feature: tuple(values) for feature, values in FEATURES.items()}

PLAIN = {feature: values[0] for feature, values in NAMES.items()} | {"strategy": "FULL_SHARD"}
"""Two shards, and nothing else."""

BOUNDS = {
    "float32": 2e-6,
    "bfloat16": 0.02,
    "8 bits by tensor": 0.15,
    "8 bits gathered": 0.15,
    "8 bits by row": 0.15,
    "library": 0.02,
    "library in 8 bits": 0.15,
}
"""The most that a gradient may be off, as the norm of the difference over the norm: as
docs/precision.md says, and why."""

TIERS = [
    pytest.param(1, id="every value"),
    pytest.param(2, id="every pair", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    pytest.param(3, id="every triple", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


@dataclass(frozen=True, kw_only=True)
class Done:
    """A case that was run."""

    case: Case
    run: Run
    """A step, and an evaluation."""
    workers: Sequence[WorkerResult]
    without: Sequence[WorkerResult]
    """One replica's, of the case without all that is promised to change no bit."""


class Lab:
    """Runs cases on one text."""

    def __init__(self, folder: Path) -> None:
        self._text = write_text(folder / "text", documents=300, words=6)
        self._cache = str(folder / "cache")
        self.done = functools.cache(self._done)
        self.plain = functools.cache(self._plain)
        self._prepared = functools.cache(self._prepare)

    def run_of(self, case: Case, **changes: Any) -> Run:
        """A case as a driver would have it, with `changes` of its settings.

        Raises:
            ConfigError: the product refuses it.
        """
        train, (_, replicas) = self._train(case, **changes), layout_of(case)
        train.check(LANES)
        train.parallel.layout(replicas)
        task = self._prepared(case["texts"], case["head"])
        build_model(task, train)
        return Run(task=task, train=train, replicas=replicas, lanes=LANES)

    def _train(self, case: Case, **changes: Any) -> TrainConfig:
        return train_of(case, self._text, steps=1, **changes)

    def _prepare(self, texts: str, head: str) -> PreparedCausalLM:
        """The task of such cases."""
        train = self._train({**PLAIN, "texts": texts, "head": head})
        return train.task.prepare(train, self._cache)

    def _plain(self, texts: str, state: str) -> FirstStep:
        """What one process computes in plain PyTorch for such cases, in float32."""
        case = {**PLAIN, "texts": texts, "state": state}
        return plain_first_step(self._prepared(texts, PLAIN["head"]), self._train(case))

    def _done(self, strength: int) -> list[Done]:
        """Cases in which every so many values meet, also of those in float32 alone: there the
        bound is tight."""
        chosen = [*cases(strength, only={"precision": ["float32"]}), *cases(strength)]
        runs = [self.run_of(case) for case in chosen]
        bare_runs = [replace(run, train=bare(run.train), replicas=1) for run in runs]
        distinct: list[Run] = []
        for run in (*runs, *bare_runs):
            if run not in distinct:
                distinct.append(run)
        # Who has no place in a run would wait for the next one too long.
        distinct.sort(key=lambda run: -run.workers)
        results = run_in_turn(distinct)

        def results_of(run: Run) -> list[WorkerResult]:
            workers = results[distinct.index(run)]
            for worker in workers:
                assert isinstance(worker, WorkerResult), (run.train, worker)
            return workers

        return [
            Done(case=case, run=run, workers=results_of(run), without=results_of(bare_run))
            for case, run, bare_run in zip(chosen, runs, bare_runs, strict=True)
        ]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a run get the path, too."""
    monkeypatch.syspath_prepend(STAND_INS)


def off_by(done: Done, plain: FirstStep) -> dict[str, float]:
    """By the parameter's name: how far its gradient is off that of one process, as a share."""
    found = full_gradients(done.workers[: done.run.train.parallel.workers])
    assert found.keys() == plain.gradients.keys()
    shares = {
        name: float((found[name] - wanted).norm() / wanted.norm())
        for name, wanted in plain.gradients.items()
    }
    return {"the loss": abs(done.workers[0].losses[0] / plain.loss - 1), **shares}


@pytest.mark.parametrize("strength", TIERS)
def test_gradients_are_those_of_one_process(lab: Lab, strength: int) -> None:
    """Shows the worst that is found, with -rP."""
    found = [
        (done.case["precision"], share, name, done.case)
        for done in lab.done(strength)
        for name, share in off_by(done, lab.plain(done.case["texts"], done.case["state"])).items()
    ]
    for precision in BOUNDS:
        print(max((off for off in found if off[0] == precision), key=lambda off: off[1]))
    wrong = [off for off in found if not off[1] < BOUNDS[off[0]]]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("strength", TIERS)
def test_options_and_replicas_change_no_bit(lab: Lab, strength: int) -> None:
    """Of losses, gradients, updated weights, and an evaluation with these: place by place."""
    wrong = [
        done.case
        for done in lab.done(strength)
        for index, worker in enumerate(done.workers)
        if not same_bits(worker, done.without[index % len(done.without)])
    ]
    assert not wrong, "\n".join(map(str, wrong))


def same_bits(one: WorkerResult, other: WorkerResult) -> bool:
    return (
        (one.losses, one.norms, one.digests) == (other.losses, other.norms, other.digests)
        and one.evaluations == other.evaluations
        and all(
            torch.equal(value, others[name][2])
            for mine, others in ((one.local, other.local), (one.gradient, other.gradient))
            for name, (_, _, value) in mine.items()
        )
    )


@pytest.mark.parametrize(("part", "says"), REFUSED)
def test_what_does_not_go_together_is_refused(lab: Lab, part: Case, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        lab.run_of({**PLAIN, **part})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {
                "parallel": ParallelConfig(shard=4, workers_per_node=2, reshard_after_forward=2),
                "micro_batch": 1,
            },
            "gathered by FSDP2 itself, not in two levels",
        ),
        ({"converters": (Float8(recipe="rowwise"),)}, "Use precision='bfloat16'"),
        ({"converters": (OnCpu(),)}, "Transformer Engine's layers are for bfloat16 here"),
    ],
)
def test_settings_that_are_no_cases_are_refused(
    lab: Lab, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        lab.run_of(PLAIN, **changes)


def test_every_pair_of_values_meets_but_those_that_are_refused() -> None:
    chosen, refused = cases(2), [part for part, _ in REFUSED]
    for one, other in combinations(NAMES, 2):
        for part in ({one: v, other: w} for v, w in product(NAMES[one], NAMES[other])):
            met = any(part.items() <= case.items() for case in chosen)
            assert met != (part in refused), part
