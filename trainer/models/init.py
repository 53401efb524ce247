"""Seeded initial weights that do not depend on the layout.

A model's own initialisation is run on the meta device while a dispatch mode records the in-place
operations applied to each parameter, and to stretches of it. Every such operation is element-wise,
so a worker can replay it on any part of the parameter: the flat tensor is cut into blocks of 65,536
numbers, each with a generator seeded by (seed, name, block), and a worker makes only the blocks
that its slice touches. The same weights come out at any shard, tensor and replica degree, and no
worker ever holds a full large tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import ConfigError

BLOCK = 65_536
RANDOM = frozenset({"normal_", "uniform_"})
CONSTANT = frozenset({"zero_", "fill_"})
SETTING = RANDOM | CONSTANT
ELEMENTWISE = SETTING | {"mul_", "add_", "sub_", "div_", "clamp_", "erfinv_"}


@dataclass(frozen=True)
class Operation:
    """One recorded in-place operation on a parameter."""

    function: Any
    """The operator."""
    args: tuple[Any, ...]
    """Its arguments after the tensor."""
    kwargs: dict[str, Any]
    """Its keywords."""
    start: int
    """First number of the flat parameter that it applies to."""
    stop: int
    """Number after the last one."""

    @property
    def name(self) -> str:
        """The operator's name, such as `normal_`."""
        return str(self.function.overloadpacket.__name__)


Recipe = tuple[Operation, ...]
"""Operations on one parameter, in order; the first one sets all of it."""


class WeightSource(Protocol):
    """Gives the initial value of any box of any parameter; the same numbers on whichever worker
    asks."""

    def read(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """The box `offsets`, `sizes` of parameter `name`, whose full shape is `shape`, on the
        CPU."""
        ...


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it, every parameter that a module registers goes to the meta device; buffers stay
    real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model that it saves with its parameters, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


class _Recorder(TorchDispatchMode):
    """Notes the in-place operations applied to the parameters of one model, and to stretches of
    them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = dict(model.named_parameters())
        self._owners = {_storage(param): (name, param.numel()) for name, param in named.items()}
        self.recipes: dict[str, Recipe] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for target in _written(func, args, kwargs):
            owner = self._owners.get(_storage(target))
            if owner is not None:
                start = int(target.storage_offset())
                operation = Operation(func, args[1:], kwargs, start, start + target.numel())
                self._record(*owner, operation, target.is_contiguous())
        return func(*args, **kwargs)

    def _record(self, name: str, count: int, operation: Operation, contiguous: bool) -> None:
        """Adds the operation to the recipe of `name`, a parameter of `count` numbers, if it can be
        replayed on a part: element-wise with plain numbers, and random only over the whole."""
        whole = (operation.start, operation.stop) == (0, count)
        values = (*operation.args, *operation.kwargs.values())
        replayable = (
            operation.name in ELEMENTWISE
            and contiguous
            and not any(isinstance(value, (torch.Tensor, list)) for value in values)
            and (whole or operation.name in CONSTANT)
            and (name in self.recipes or (whole and operation.name in SETTING))
        )
        if not replayable:
            raise ConfigError(
                "train.task.model",
                name,
                f"its initialisation uses {operation.name} in a way that cannot be replayed slice "
                f"by slice",
                "Use trainer.tasks.task.CustomTask, which initialises the whole model on the CPU",
            )
        before = () if whole and operation.name in SETTING else self.recipes[name]
        self.recipes[name] = (*before, operation)


def _written(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to, by the operator's schema."""
    for place, argument in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.is_write and value is not None:
            yield from value if isinstance(value, (list, tuple)) else (value,)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def record_recipes(model: nn.Module, initialize: Any) -> dict[str, Recipe]:
    """Runs `initialize(module)` over all modules of a meta model and returns each parameter's
    recipe. Children go before their parents, as in transformers: GPT-2's blocks scale weights
    that their layers have set.

    Raises:
        ConfigError: for an operation that is not element-wise, or a parameter left uninitialised.
    """
    storages = {name: param.untyped_storage() for name, param in model.named_parameters()}
    with torch.no_grad(), _Recorder(model) as recorder:
        model.apply(initialize)
    # What was done to a parameter's data before or after they were replaced is not in its recipe.
    missing = sorted(
        name
        for name, param in model.named_parameters()
        if name not in recorder.recipes or _storage(param) != storages[name]._cdata
    )
    if missing:
        raise ConfigError(
            "train.task.model",
            missing[0],
            f"the model's own initialisation leaves it and {len(missing) - 1} others unset",
            "Use trainer.tasks.task.CustomTask, which initialises the whole model on the CPU",
        )
    return recorder.recipes


class SeededWeights:
    """Replays recorded initialisations on any box of a parameter. Implements WeightSource."""

    def __init__(self, recipes: dict[str, Recipe], seed: int) -> None:
        self._recipes, self._seed = recipes, seed

    def read(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """See WeightSource. Makes whole rows, then cuts the other dimensions."""
        if not shape:
            return self._flat(name, 0, 1).reshape(())
        row = math.prod(shape[1:])
        flat = self._flat(name, offsets[0] * row, (offsets[0] + sizes[0]) * row)
        rows = flat.reshape(sizes[0], *shape[1:])
        cut = tuple(slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True))
        return rows[(slice(None), *cut)]

    def _flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        first, last = start // BLOCK, -(-stop // BLOCK)
        blocks = [self._block(name, index) for index in range(first, last)]
        if not blocks or stop <= start:
            return torch.empty(0)
        return torch.cat(blocks)[start - first * BLOCK : stop - first * BLOCK]

    def _block(self, name: str, index: int) -> torch.Tensor:
        key = hashlib.sha256(f"{self._seed}/{name}/{index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        block = torch.empty(BLOCK)
        for operation in self._recipes[name]:
            part = block[_within(operation.start, index) : _within(operation.stop, index)]
            random = {"generator": generator} if operation.name in RANDOM else {}
            # A random operation fills the block to its end, so that the numbers do not depend on
            # where the parameter ends.
            operation.function(
                block if random else part, *operation.args, **{**operation.kwargs, **random}
            )
        return block


def _within(position: int, index: int) -> int:
    """A position of the flat parameter, as one in block `index`, cut to it."""
    return min(max(position - index * BLOCK, 0), BLOCK)


class FullWeights:
    """Boxes of tensors that are held whole. Implements WeightSource."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """See WeightSource."""
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        return self._tensors[name][box]
