"""Weights that FSDP2 gathers at once are asked one after the other, and prepared at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.float8.shard import Float8Shard
from trainer.parallel.apply import local_tensor
from trainer.parallel.together import gather_together


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Asked:
    """A block of three layers, the second of which is gathered as ever, and how its weights are
    prepared: to their first numbers."""

    def __init__(self) -> None:
        self.layers: list[Any] = [nn.Linear(4, 4, bias=False) for _ in range(3)]
        self.own = self.layers[0], self.layers[2]
        for layer in self.own:
            layer.weight = nn.Parameter(Float8Shard(layer.weight.detach()))
        block = nn.Sequential(*self.layers)
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        gather_together(block)
        self.times = 0

    def set(self, *numbers: float) -> None:
        with torch.no_grad():
            for layer, number in zip(self.own, numbers, strict=True):
                local_tensor(layer.weight).fill_(number)

    def ask(self, index: int) -> float:
        layer = self.layers[index]
        answer: float = layer.together.answer(layer, self._prepare)
        return answer

    def _prepare(self, shards: list[torch.Tensor]) -> list[float]:
        self.times += 1
        return [shard[0, 0].item() for shard in shards]


def test_one_is_asked_and_all_are_prepared() -> None:
    asked = Asked()
    assert not hasattr(asked.layers[1], "together")
    for number in range(2):
        asked.set(number, 10 + number)
        assert (asked.ask(0), asked.ask(2)) == (number, 10 + number)
    assert asked.times == 2


def test_a_gather_that_broke_off_leaves_nothing_to_the_next() -> None:
    asked = Asked()
    asked.set(1, 2)
    assert asked.ask(0) == 1
    asked.set(3, 4)
    assert (asked.ask(0), asked.ask(2)) == (3, 4)


def test_groups_on_their_way_keep_apart() -> None:
    one, other = Asked(), Asked()
    one.set(1, 2)
    other.set(3, 4)
    assert (one.ask(0), other.ask(0), one.ask(2), other.ask(2)) == (1, 3, 2, 4)


def test_nobody_is_asked_twice() -> None:
    asked = Asked()
    asked.set(1, 2)
    asked.ask(0)
    asked.ask(2)
    with pytest.raises(KeyError):
        asked.ask(2)
