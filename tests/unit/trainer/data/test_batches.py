"""What a batch may be on its way to the device: what torch's collation makes."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import BatchEncoding

from trainer.data.batches import to_device
from trainer.tasks.trial import try_loss

META = torch.device("meta")
"""A device that a CPU can copy to."""

Pair = namedtuple("Pair", ["one", "other"])


class Noted(dict[str, Any]):
    """A dictionary with more to it."""

    note = "none"


class Sealed(Mapping[str, Any]):
    """A mapping that cannot be made from its values alone."""

    def __init__(self, values: Mapping[str, Any], seal: str) -> None:
        self._values, self.seal = values, seal

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def numbers() -> dict[str, Any]:
    return {"ids": torch.arange(3), "name": "a", "more": [torch.ones(2)]}


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, Noted, UserDict, BatchEncoding, MappingProxyType]
)
def test_all_tensors_of_a_mapping_are_moved_and_it_stays_what_it_is(kind: Any) -> None:
    batch = kind(numbers())
    moved = to_device(batch, META)
    assert type(moved) is kind and [*moved] == ["ids", "name", "more"]
    assert moved["ids"].device == moved["more"][0].device == META and moved["name"] == "a"
    assert batch["ids"].device.type == "cpu", "the one before stays as it was"


def test_what_else_a_mapping_has_stays() -> None:
    noted, lists = Noted(numbers()), defaultdict(list, numbers())
    noted.note = "mine"
    assert to_device(noted, META).note == "mine"
    assert to_device(lists, META).default_factory is list


def test_one_that_cannot_be_made_anew_becomes_a_dict() -> None:
    moved = to_device(Sealed(numbers(), "wax"), META)
    assert type(moved) is dict and moved["ids"].device == META


def test_lists_and_tuples_stay_what_they_are() -> None:
    moved = to_device([(torch.ones(1), 2), Pair(torch.ones(1), None)], META)
    (first, second) = moved
    assert type(first) is tuple and first[0].device == META and first[1] == 2
    assert isinstance(second, Pair) and second.one.device == META


def test_what_collation_makes_of_samples_is_moved() -> None:
    batch = default_collate([UserDict(x=torch.ones(2)), UserDict(x=torch.zeros(2))])
    assert to_device(batch, META)["x"].device == META


class Batches:
    """Data with batches of its own."""

    def __len__(self) -> int:
        return 2

    def batch(self, ids: Any) -> Sealed:
        return Sealed({"x": torch.ones(len(ids), 3)}, "wax")


class Task:
    """As one of a plugin."""

    def __init__(self) -> None:
        self.seen: list[type] = []

    def train_data(self) -> Batches:
        return Batches()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.seen.append(type(batch))
        return model(batch["x"]).sum(), 2


def test_the_driver_tries_the_loss_on_what_workers_see() -> None:
    task: Any = Task()
    try_loss(task, nn.Linear(3, 1), "fast")
    assert task.seen == [dict]
