"""A compiled sum of gradients has the bits of torch's, and takes what it is made for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from tests.support.compiled_sums import record_sums
from trainer.parallel import wide_sums
from trainer.parallel.wide_sums import add_wide, make_add

LARGE = wide_sums._LEAST


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of what is compiled: how many numbers each call adds."""
    return record_sums(monkeypatch)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


CASES: dict[str, tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], bool]] = {
    "a matrix": (lambda: (random(256, 256, dtype=torch.float32), random(256, 256)), True),
    "another size": (lambda: (random(1040, 64, dtype=torch.float32), random(1040, 64)), True),
    "small": (lambda: (random(LARGE - 16, dtype=torch.float32), random(LARGE - 16)), False),
    "no whole rows": (lambda: (random(LARGE + 1, dtype=torch.float32), random(LARGE + 1)), False),
    "float32": (
        lambda: (random(LARGE, dtype=torch.float32), random(LARGE, dtype=torch.float32)),
        False,
    ),
    "at an odd address": (
        lambda: (random(LARGE + 1, dtype=torch.float32)[1:], random(LARGE)),
        False,
    ),
    "at an odd address of a storage of its own": (
        lambda: (from_dlpack(random(LARGE + 1, dtype=torch.float32)[1:]), random(LARGE)),
        False,
    ),
    "turned": (lambda: (random(512, 256, dtype=torch.float32), random(256, 512).t()), False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_torch(case: str, calls: list[int]) -> None:
    """Whether it is one for the compiled kernel or not."""
    make, compiled = CASES[case]
    add = make_add("require", torch.device("cpu"))
    calls.clear()
    (ours, given), (theirs, _) = make(), make()
    before = ours.clone()
    add([ours], [given])
    add_wide([theirs], [given])
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, before)
    assert calls == ([ours.numel()] if compiled else [])


def test_large_and_small_ones_of_a_group_find_their_places(calls: list[int]) -> None:
    sizes = [8, LARGE, 24, 2 * LARGE]
    ours = [random(size, dtype=torch.float32) for size in sizes]
    theirs = [tensor.clone() for tensor in ours]
    given = [random(size + 1)[:size] for size in sizes]
    add = make_add("on", torch.device("cpu"))
    calls.clear()
    add(ours, given)
    add_wide(theirs, given)
    assert all(map(torch.equal, ours, theirs))
    assert calls == [LARGE, 2 * LARGE]


def test_it_is_compiled_before_the_first_step(calls: list[int]) -> None:
    """And nothing is where it is not asked for."""
    make_add("on", torch.device("cpu"))
    assert len(calls) == 1
    assert make_add("off", torch.device("cpu")) is add_wide
    assert len(calls) == 1


def test_one_graph_serves_all_sizes() -> None:
    add = make_add("require", torch.device("cpu"))
    torch._dynamo.utils.counters.clear()
    for rows in (LARGE // 16, 5001, 70000):
        add([torch.zeros(16 * rows)], [random(16 * rows)])
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
