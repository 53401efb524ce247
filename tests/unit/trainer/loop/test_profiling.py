"""A profile of some steps: what it holds, and what it says where a generation ends in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trainer.config import Steps, TrainConfig
from trainer.errors import ConfigError
from trainer.loop.profiling import MOST_OPERATORS, Profile, StepProfiler, attention_kernels


def profiler(folder: Path, told: list[Profile], worker: str = "w0") -> StepProfiler:
    return StepProfiler(Steps(10, 13), folder, worker, on_cuda=False, tell=told.append)


def do_steps(profiler: StepProfiler, begin: int, end: int) -> None:
    """Steps of one matrix product, each of another width, and the end of the generation."""
    for step in range(begin, end):
        profiler.begin(step)
        torch.ones(step, step) @ torch.ones(step, step)
    profiler.end(end)


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
    running.end(14)
    assert told[0].attention == ("flash", "math")
    gpu = ("cudnn_attention", "efficient_attention_backward", "flash_attention", "attention_math")
    names = [f"aten::_scaled_dot_product_{name}" for name in gpu]
    assert attention_kernels(names) == ("cudnn", "efficient", "flash", "math")
    assert attention_kernels(["aten::scaled_dot_product_attention", "aten::mm"]) == ()


def test_where_a_roster_ends_in_it_the_next_lead_has_the_rest(tmp_path: Path) -> None:
    told: list[Profile] = []
    do_steps(profiler(tmp_path, told), 0, 12)
    do_steps(profiler(tmp_path, told, "w1"), 12, 20)
    assert [(p.first, p.last, Path(p.file).name) for p in told] == [
        (10, 11, "steps-10-11-w0.json.gz"),
        (12, 13, "steps-12-13-w1.json.gz"),
    ]
    assert [products(p) for p in told] == [2, 2]
    assert all(p.problem and "no more of 10 to 13" in p.problem for p in told)


def test_a_roster_that_did_none_of_its_steps_whole_leaves_nothing(tmp_path: Path) -> None:
    told: list[Profile] = []
    first = profiler(tmp_path, told)
    first.begin(10)
    first.end(10)
    assert not told and not list(tmp_path.iterdir())


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    told: list[Profile] = []
    (tmp_path / "file").touch()
    do_steps(profiler(tmp_path / "file", told), 0, 14)
    assert told[0].problem is not None and "cannot be written" in told[0].problem
    assert told[0].operators


@pytest.mark.parametrize(("first", "last"), [(0, 3), (-1, 3), (4, 3)])
def test_steps_that_cannot_be_are_refused(first: int, last: int) -> None:
    with pytest.raises(ConfigError, match=r"train\.profile"):
        Steps(first, last)


def test_steps_beyond_the_run_are_refused() -> None:
    train = TrainConfig(task=None, steps=10, global_batch=1, profile=Steps(8, 10))
    with pytest.raises(ConfigError, match=r"train\.profile\.last.*the last step is 9"):
        train.check(1)
    TrainConfig(task=None, steps=11, global_batch=1, profile=Steps(8, 10)).check(1)
