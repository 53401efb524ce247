"""What is refused to a thread that reads ahead, where there are GPUs. Without: test_loader.py."""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trainer.loop.draws import DrawnError, Draws, seed_generators


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Generator, ...]:
    """Generators that torch's functions take for those of two GPUs."""
    generators = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: len(generators))
    return generators


def test_a_seed_is_refused_before_any_generator_has_it(gpus: tuple[torch.Generator, ...]) -> None:
    torch.manual_seed(3)
    assert [gpu.initial_seed() for gpu in gpus] == [3, 3], "torch finds them"
    draws = Draws(refused=True)
    with pytest.raises(DrawnError), draws:
        torch.manual_seed(4)
    assert draws.asked and [gpu.initial_seed() for gpu in gpus] == [3, 3]
    assert torch.initial_seed() == 3


def test_another_thread_seeds_the_gpus_meanwhile(gpus: tuple[torch.Generator, ...]) -> None:
    with ThreadPoolExecutor(1) as other, Draws(refused=True) as draws:
        other.submit(seed_generators, 5, torch.device("cuda")).result()
        assert other.submit(lambda: torch.cuda.default_generators[0]).result() is gpus[0]
    assert not draws.asked and [gpu.initial_seed() for gpu in gpus] == [5, 5]
    assert type(torch.cuda.default_generators) is tuple and torch.cuda.default_generators == gpus


def test_gpus_that_are_first_used_while_one_reads_ahead_keep_their_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch sets the name when it begins to use them."""
    generators = (torch.Generator(),)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    with Draws(refused=True):
        monkeypatch.setattr(torch.cuda, "default_generators", generators)
    assert torch.cuda.default_generators is generators


def test_a_stand_in_that_somebody_has_bound_refuses_in_such_blocks_and_nowhere_else() -> None:
    """A module that an item imports while it is read ahead binds it, and has it for good."""
    with Draws(refused=True):
        bound = vars(torch.random)["default_generator"]  # torch does not declare it
    torch.manual_seed(3)
    assert bound is not torch.default_generator and bound.initial_seed() == 3
    with Draws(refused=False):
        assert bound.initial_seed() == 3, "as it is due"
    later = Draws(refused=True)
    with pytest.raises(DrawnError), later:
        bound.manual_seed(4)
    assert later.asked and torch.initial_seed() == 3


def test_a_step_seeds_as_torch_does_without_a_look_at_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For kinds of devices that are not there torch formats the stack, from the files."""
    looked: list[str] = []

    def look(*_: object) -> list[str]:
        looked.append("a stack")
        return []

    monkeypatch.setattr(traceback, "format_stack", look)
    torch.manual_seed(7)
    assert looked
    looked.clear()
    expected = torch.rand(3)
    seed_generators(7, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected) and not looked
