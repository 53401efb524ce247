"""What a read may not do while the step computes: draw from torch's generators, seed or save them.

The default generators are one for all threads. `Draws` is a block of the thread that reads. It
sees what draws, as operators that do have a tag; and what seeds, saves or puts back a generator by
the functions of `torch`, `torch.random` and `torch.cuda`, however they are called: in the block
these find a stand-in in place of the generator, which refuses the one thread and passes on what
others ask. It sees neither threads of the dataset's own nor `torch.default_generator` by that name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils import _python_dispatch as dispatch


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the default generators of the CPU and of GPUs, before each micro-batch. As
    `torch.manual_seed`, which also asks for kinds of devices that are not there, and formats this
    thread's stack for each: it looks up all its files on the disk."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


class DrawnError(BaseException):
    """Not an Exception: a dataset that catches those does not go on without the numbers."""


class Draws(dispatch.TorchDispatchMode):
    """In the block: notes whether its thread draws from a generator that others use, too.

    Args:
        refused: it may not, nor may it seed or save one, and `DrawnError` ends what asked for it.
            At most one thread is in such a block.
    """

    def __init__(self, *, refused: bool) -> None:
        super().__init__()
        self._refused, self._reader = refused, 0
        self.asked = False
        """Whether it drew, or was to draw, seed or save."""

    _present: ClassVar[Draws | None] = None
    """The block of the thread that is refused now. Who has bound a stand-in under a name of its own
    keeps it beyond the block that it came from."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What an item has compiled stays so."""
        return True

    # Not the class's own: that sets flags of the whole process, by which the main thread would run
    # compiled blocks uncompiled.
    def __enter__(self) -> Draws:
        if self._refused:
            self._reader = threading.get_ident()
            Draws._present = self
            _stand_in(self._check)
        dispatch._push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        dispatch._pop_mode()
        if self._refused:
            Draws._present = None
            _put_back()

    @classmethod
    def _check(cls) -> None:
        """Called by whoever wants a generator."""
        present = cls._present
        if present is not None and threading.get_ident() == present._reader:
            present.asked = True
            raise DrawnError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if draws and kwargs.get("generator") is None:
            self.asked = True
            if self._refused:
                raise DrawnError
        return func(*args, **kwargs)


class _Generator:
    """In place of the CPU's generator. All that is asked of it passes `check` first."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __getattr__(self, name: str) -> Any:
        self._check()
        return getattr(torch.default_generator, name)


class _Generators(tuple[torch.Generator, ...]):
    """In place of those of the GPUs. Whoever takes one passes `check` first."""

    check: Callable[[], None]

    def __getitem__(self, index: Any) -> Any:
        self.check()
        return super().__getitem__(index)


# The names by which the functions find the generators when they are called. As what saves one is
# refused, too, `fork_rng` and torch's compiler end before they begin: they put nothing back.
_CPU, _GPUS = "default_generator", "default_generators"


def _stand_in(check: Callable[[], None]) -> None:
    vars(torch.random)[_CPU] = _Generator(check)
    if torch.cuda.is_initialized():  # else torch sets the name, maybe meanwhile
        generators = _Generators(vars(torch.cuda)[_GPUS])
        generators.check = check
        vars(torch.cuda)[_GPUS] = generators


def _put_back() -> None:
    vars(torch.random)[_CPU] = torch.default_generator
    found = vars(torch.cuda)[_GPUS]
    if isinstance(found, _Generators):
        vars(torch.cuda)[_GPUS] = tuple(found)
