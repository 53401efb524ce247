"""A profile of some steps: what it holds, and what it says where a generation ends in it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.support.data_plane import make_engine, make_lone_loop
from tests.support.member import small_task, small_train
from tests.support.quiet_link import QuietLink
from trainer.backend.rendezvous import Rendezvous
from trainer.config import Steps, TrainConfig
from trainer.errors import ConfigError
from trainer.loop.phases import Phase
from trainer.loop.profiling import MOST_OPERATORS, Profile, StepProfiler, attention_kernels
from trainer.loop.steps import TrainLoop


def profiler(folder: Path, told: list[Profile], worker: str = "w0") -> StepProfiler:
    return StepProfiler(Steps(10, 13), folder, worker, on_cuda=False, tell=told.append)


def do_steps(profiler: StepProfiler, begin: int, end: int) -> None:
    """Steps of one matrix product, each of another width, and the end of the generation."""
    for step in range(begin, end):
        profiler.begin(step)
        torch.ones(step, step) @ torch.ones(step, step)
        if profiler.is_last(step):
            profiler.end()
    profiler.drop()


def trace_of(profile: Profile) -> list[dict[str, Any]]:
    with gzip.open(profile.file, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def products(profile: Profile) -> int:
    return sum(event["name"] == "aten::mm" for event in trace_of(profile))


@pytest.mark.parametrize("end", [14, 20])
def test_it_holds_the_steps_that_were_asked_for(tmp_path: Path, end: int) -> None:
    told: list[Profile] = []
    do_steps(profiler(tmp_path / "profile", told), 0, end)
    (profile,) = told
    assert (profile.first, profile.last, profile.problem) == (10, 13, None)
    assert Path(profile.file) == tmp_path / "profile" / "steps-10-13-w0.json.gz"
    assert products(profile) == 4
    assert {o.name: o.calls for o in profile.operators}["aten::mm"] == 4
    times = [operator.cpu_ms for operator in profile.operators]
    assert times == sorted(times, reverse=True) and len(times) <= MOST_OPERATORS


def test_it_tells_the_kernels_that_attention_has_taken(tmp_path: Path) -> None:
    told: list[Profile] = []
    running = profiler(tmp_path, told)
    heads = torch.randn(1, 2, 8, 16, requires_grad=True)
    for step in range(10, 14):
        running.begin(step)
        choice = [SDPBackend.MATH] if step == 13 else [SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(choice):
            scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    running.end()
    assert told[0].attention == ("flash", "math")
    gpu = ("cudnn_attention", "efficient_attention_backward", "flash_attention", "attention_math")
    names = [f"aten::_scaled_dot_product_{name}" for name in gpu]
    assert attention_kernels(names) == ("cudnn", "efficient", "flash", "math")
    assert attention_kernels(["aten::scaled_dot_product_attention", "aten::mm"]) == ()


def test_where_a_roster_ends_in_it_the_next_lead_has_the_rest(tmp_path: Path) -> None:
    told: list[Profile] = []
    former = profiler(tmp_path, told)
    do_steps(former, 0, 12)
    assert not told and not list(tmp_path.iterdir()) and not former.running
    do_steps(profiler(tmp_path, told, "w1"), 12, 20)
    (profile,) = told
    assert (profile.first, profile.last) == (12, 13)
    assert Path(profile.file).name == "steps-12-13-w1.json.gz" and products(profile) == 2
    assert profile.problem == "steps 10 to 11 are not in it: its roster began later"


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    told: list[Profile] = []
    (tmp_path / "file").touch()
    do_steps(profiler(tmp_path / "file", told), 0, 14)
    assert told[0].problem is not None and "cannot be written" in told[0].problem
    assert told[0].operators


@dataclass
class Watching(QuietLink):
    """What a loop does one after the other: phases, evaluations, and profiles that end."""

    story: list[str] = field(default_factory=list)

    def at_step(self, step: int, phase: Phase) -> None:
        self.story.append(phase)

    def evaluated(self, step: int, loss: float, tokens: int) -> None:
        self.story.append(f"evaluated before {step}")

    def profiled(self, profile: Profile) -> None:
        self.story.append(f"profiled {profile.first} to {profile.last}")


@pytest.fixture
def make_loop(port: int, tmp_path: Path) -> Iterator[Callable[[Watching, Steps], TrainLoop]]:
    """A run of four steps by one worker, evaluated after each, with a profile of some."""
    task = replace(small_task(), eval_dataset=small_task().dataset[:4])
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    engine = make_engine(0, meet, task, replace(small_train(4), eval_every=1), replicas=1)
    loops: list[TrainLoop] = []

    def make(link: Watching, steps: Steps) -> TrainLoop:
        profiler = StepProfiler(steps, tmp_path, "w0", on_cuda=False, tell=link.profiled)
        loops.append(make_lone_loop(meet, engine, link, until=4, profiler=profiler))
        return loops[-1]

    yield make
    for loop in loops:
        loop.cross.close()


def test_a_profile_ends_with_its_last_step_before_what_is_due_after_it(
    make_loop: Callable[[Watching, Steps], TrainLoop],
) -> None:
    link = Watching()
    loop = make_loop(link, Steps(1, 2))
    assert loop.run() == "finished"
    ended = link.story.index("profiled 1 to 2")
    assert link.story[ended - 2 : ended] == ["optimizer", "profile"]
    assert link.story[ended + 1 : ended + 3] == ["evaluation", "evaluated before 3"]
    assert sum(entry.startswith("profiled") for entry in link.story) == 1


def test_an_error_in_a_profile_is_not_kept_back_by_it(
    make_loop: Callable[[Watching, Steps], TrainLoop], tmp_path: Path
) -> None:
    class Failing(Watching):
        def at_step(self, step: int, phase: Phase) -> None:
            super().at_step(step, phase)
            if (step, phase) == (2, "backward"):
                raise RuntimeError("a peer is gone")

    link = Failing()
    loop = make_loop(link, Steps(1, 3))
    with pytest.raises(RuntimeError, match="a peer is gone"):
        loop.run()
    assert link.story[-1] == "backward" and not list(tmp_path.iterdir())
    assert loop.profiler is not None and loop.profiler.running
    loop.profiler.drop()


@pytest.mark.parametrize(("first", "last"), [(0, 3), (-1, 3), (4, 3)])
def test_steps_that_cannot_be_are_refused(first: int, last: int) -> None:
    with pytest.raises(ConfigError, match=r"train\.profile"):
        Steps(first, last)


def test_steps_beyond_the_run_are_refused() -> None:
    train = TrainConfig(task=None, steps=10, global_batch=1, profile=Steps(8, 10))
    with pytest.raises(ConfigError, match=r"train\.profile\.last.*the last step is 9"):
        train.check(1)
    TrainConfig(task=None, steps=11, global_batch=1, profile=Steps(8, 10)).check(1)
