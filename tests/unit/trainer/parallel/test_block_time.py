"""Marks round a block's forward, without what FSDP2 does before and after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trainer.backend.groups import without_peers
from trainer.loop.clock import StepClock
from trainer.parallel.block_time import BlockTimes
from trainer.parallel.layout import ParallelDims
from trainer.parallel.recompute import recompute_blocks


class Block(nn.Module):
    """Tells when it computes."""

    def __init__(self, story: list[str]) -> None:
        super().__init__()
        self.inner, self.story = nn.Linear(4, 4), story

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Alike for all."""
        self.story.append("computes")
        out: torch.Tensor = self.inner(numbers)
        return out.tanh()


class Model(nn.Module):
    """Three blocks, of which the second tells."""

    def __init__(self, story: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block([]), Block(story), Block([])])

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for block in self.blocks:
            numbers = block(numbers)
        return numbers


NAMES = ("blocks.0", "blocks.1", "blocks.2")


def model_and_times(story: list[str]) -> tuple[nn.Module, BlockTimes]:
    """Whose blocks are computed again in backward."""
    model = Model(story)
    recompute_blocks(model, NAMES, "full")

    def stamp() -> int:
        story.append("mark")
        return len(story)

    times = BlockTimes(stamp)
    times.cover(model, NAMES)
    return model, times


@pytest.fixture
def mesh() -> Iterator[Any]:
    with without_peers(ParallelDims(shard=2), "cpu") as mesh:
        yield mesh.fsdp


def test_what_fsdp_waits_for_is_outside_and_a_recomputation_is_not_noted(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = list[str]()
    model, times = model_and_times(story)
    for name in NAMES:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    real = FSDPParamGroup.wait_for_unshard

    def wait(group: Any) -> None:
        story.append("waits")
        real(group)

    monkeypatch.setattr(FSDPParamGroup, "wait_for_unshard", wait)
    assert times.take() == []
    model(torch.ones(2, 4)).sum().backward()
    begin, end = (index for index, told in enumerate(story) if told == "mark")
    assert story[begin:end] == ["mark", "computes"]
    assert story[begin - 1] == "waits" and {"waits", "computes"} <= {*story[end:]}
    assert len(times.take()) == 1


def test_an_evaluation_and_what_nobody_asks_for_is_not_noted() -> None:
    story = list[str]()
    model, times = model_and_times(story)
    model(torch.ones(2, 4))
    assert "mark" not in story and times.take() == []
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.eval()(torch.ones(2, 4))
    assert "mark" not in story and times.take() == []


@pytest.mark.parametrize("blocks", [(), ("layers.0.experts.0", "layers.0.experts.1")])
def test_a_model_without_blocks_or_with_experts_has_nothing_to_tell(blocks: Any) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": Model([]).blocks})])})
    times = BlockTimes(lambda: 0)
    times.cover(model, blocks)
    assert times.take() == []
    for name in blocks:
        model.get_submodule(name)(torch.ones(1, 4))
    assert times.take() == []


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, in its last number."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[-1])
    return now


def test_a_worker_s_own_time_is_that_of_its_blocks(seconds: list[float]) -> None:
    """Of the second of three steps: two micro-batches of which a block takes 2 s and 4 s, three
    blocks, and backward twice as long as forward."""
    model = Model([])
    times = BlockTimes(lambda: seconds[-1])
    times.cover(model, NAMES)
    clock = StepClock(torch.device("cpu"), times)
    block = model.get_submodule("blocks.1")
    found = []
    with contextlib.closing(clock):
        for step in range(3):
            clock.begin()
            clock.enter("forward")
            for took_s in (2.0, 4.0):
                block.register_forward_pre_hook(lambda *_: seconds.append(seconds[-1] + 100))
                handle = block.inner.register_forward_hook(  # type: ignore[union-attr]
                    lambda *_, took_s=took_s: seconds.append(seconds[-1] + took_s)
                )
                block(torch.ones(1, 4))
                handle.remove()
                clock.took(1, 0.0)
            clock.enter("in_commit")
            clock.committed(step)
            found.append(clock.take_own())
    assert [own and own.compute_s for own in found] == [None, None, 3 * 3 * 6.0]
