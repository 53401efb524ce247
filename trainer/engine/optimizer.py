"""The optimizer of one worker's slices, and the trial of what a run needs of it.

The state is made before the first step, for heals and restores fill it. That, and that each worker
updates its own slices alone, holds for some of torch's optimizers only: the trial finds out which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from trainer.errors import CompileError, CompilerFailed, ConfigError
from trainer.optimizer import Optimizer, master_dtype, moment_dtype
from trainer.parallel.compiled import Compile
from trainer.rounded_adamw import RoundedAdamW

_SHAPES = {"matrix": (32, 32), "vector": (64,), "other": (32,)}
"""Of the trial's parameters. Vector instructions divide them and their parts: the tail of a kernel
may round otherwise. The compiled update of bfloat16 state has one graph for all sizes."""
_PARTS: dict[str, Any] = {"matrix": (slice(16), slice(16)), "vector": slice(32), "other": slice(0)}
"""What one worker would have of them; of the last one nothing."""
_COMPILED_FOR = (512, 512)
"""The matrix, where the update is compiled. The compiler sees it first, and chooses by its size how
many numbers a thread has: of a small one they would be too few for vector loads."""
_RATES = (0.01, 0.0, 0.02)
"""Learning rates of the trial's steps."""

_Tensors = dict[str, torch.Tensor]


class SliceOptimizer:
    """The optimizer of one worker's slices.

    Args:
        config: what was asked for.
        slices: the trainable local slices, by the parameter's name.
        counter: form of the step counter in each slice's state; None where it keeps none.
        compiled: see TrainConfig.

    Raises:
        ConfigError: what `make` has made has other parameters, or several learning rates.
    """

    def __init__(
        self,
        config: Optimizer,
        slices: Mapping[str, nn.Parameter],
        counter: torch.Tensor | None,
        compiled: Compile = "off",
    ) -> None:
        self.inner = _make(config, slices, compiled)
        """Torch's."""
        self.moments = {
            moment: {name: _empty_moment(config, param) for name, param in slices.items()}
            for moment in config.moments
        }
        """By the moment's name and the parameter's."""
        self._steps, self._counters = 0, list[torch.Tensor]()
        for name, param in slices.items():
            state = {moment: tensors[name] for moment, tensors in self.moments.items()}
            if counter is not None:
                state["step"] = torch.zeros_like(counter)
                self._counters.append(state["step"])
            self.inner.state[param] = state

    @property
    def steps(self) -> int:
        """Steps done."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        for counter in self._counters:
            counter.fill_(steps)

    @property
    def takes_scale(self) -> bool:
        """Whether `step` can be told to scale the gradients."""
        return isinstance(self.inner, RoundedAdamW) and self.inner.takes_scale

    def step(self, rate: float, scale: float = 1.0) -> None:
        """Updates the slices by their gradients, at a learning rate.

        Args:
            rate: it.
            scale: of the gradients; 1 unless `takes_scale`.
        """
        for group in self.inner.param_groups:
            group["lr"] = rate
            if self.takes_scale:
                group["scale"] = scale
        self.inner.step()
        self._steps += 1


def _make(
    config: Optimizer, slices: Mapping[str, nn.Parameter], compiled: Compile
) -> torch.optim.Optimizer:
    optimizer = config.make(slices)
    _check_groups(config, optimizer, slices)
    if compiled != "off" and isinstance(optimizer, RoundedAdamW):
        optimizer.compile(required=compiled == "require")
    return optimizer


def _check_groups(
    config: Optimizer, optimizer: torch.optim.Optimizer, slices: Mapping[str, nn.Parameter]
) -> None:
    """Refuses groups that lack a parameter, or have several learning rates. Called for the trial
    and for the model: a `make` that goes by names shows only with the model's."""
    groups = optimizer.param_groups
    # Of a slice without numbers nothing is left to update.
    grouped = [id(param) for group in groups for param in group["params"] if param.numel()]
    given = {id(param): name for name, param in slices.items() if param.numel()}
    if sorted(grouped) != sorted(given):
        left_out = [name for place, name in given.items() if place not in grouped]
        raise ConfigError(
            "train.optimizer",
            config,
            f"its groups have {len(grouped)} tensors, of {len(given)} parameters given"
            + (f"; {left_out[0]} is in none" if left_out else ""),
            "Have make(params) give each of them to the optimizer once, as it is",
        )
    rates = sorted({float(group["lr"]) for group in groups if "lr" in group})
    if len(rates) > 1:
        raise ConfigError(
            "train.optimizer",
            config,
            f"its groups have the learning rates {', '.join(map(str, rates))}, and a run has one: "
            "rate(step, steps) is set in every group before each step",
            "Give all groups one lr. A group's share of it can be another setting of the group, "
            "which the optimizer's own step() multiplies lr by",
        )


def as_leaf(local: torch.Tensor) -> nn.Parameter:
    """A local slice as an optimizer gets it: its gradient is float32, whatever it is itself."""
    leaf = nn.Parameter(local)
    leaf.grad_dtype = torch.float32
    return leaf


def _empty_moment(config: Optimizer, param: torch.Tensor) -> torch.Tensor:
    dtype = moment_dtype(config, dtype_name(param.dtype))
    return torch.zeros_like(param, dtype=getattr(torch, dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """As in a checkpoint."""
    return str(dtype).removeprefix("torch.")


def make_optimizer(
    config: Optimizer,
    slices: Mapping[str, nn.Parameter],
    device: torch.device,
    compiled: Compile,
) -> SliceOptimizer:
    """The optimizer of a worker's slices, tried on its device, where it is compiled.

    Raises:
        ConfigError: see `try_optimizer`.
    """
    return SliceOptimizer(config, slices, try_optimizer(config, device, compiled), compiled)


def try_optimizer(
    config: Optimizer, device: torch.device | str = "cpu", compiled: Compile = "off"
) -> torch.Tensor | None:
    """Takes a few steps with small tensors, and checks what a run needs of an optimizer.

    Returns:
        The form of its step counter; None where it keeps none.

    Raises:
        ConfigError: what it does that it should not, or a number of it is out of its range.
    """
    config.check()
    try:
        return _Trial(config, device, compiled).run()
    except (ConfigError, CompileError, CompilerFailed):
        raise
    except Exception as error:
        raise ConfigError(
            "train.optimizer",
            config,
            f"in a trial on small tensors it raised {type(error).__name__}: {error}",
            "Have make(params) return a torch optimizer that updates CPU tensors, too, by step() "
            "without an argument",
        ) from error


class _Trial:
    """The same steps with an optimizer as its maker left it, with one whose state was made for it,
    with one that has a part of each parameter, and with one that goes on from another's state."""

    def __init__(self, config: Optimizer, device: torch.device | str, compiled: Compile) -> None:
        self._config, self._compiled = config, compiled
        generator = torch.Generator().manual_seed(1)
        shapes = _SHAPES if compiled == "off" else {**_SHAPES, "matrix": _COMPILED_FOR}

        def random(dtype: torch.dtype) -> _Tensors:
            return {
                name: torch.randn(shape, generator=generator).to(device, dtype)
                for name, shape in shapes.items()
            }

        self._weights = random(getattr(torch, master_dtype(config)))
        self._gradients = [random(torch.float32) for _ in _RATES]
        self._counter: torch.Tensor | None = None

    def run(self) -> torch.Tensor | None:
        """See `try_optimizer`."""
        self._check_first_step()
        whole, part = self._steps(self._weights), self._steps(_part_of(self._weights))
        for rate, gradients in zip(_RATES, self._gradients, strict=True):
            before = whole.copy()
            whole.step(gradients, rate)
            part.step(_part_of(gradients), rate)
            if rate == 0 and not _equal(whole.weights(), before, names=_SHAPES):
                self._refuse(
                    "at a learning rate of 0 the weights move",
                    "Have step() go by group['lr'], which is set before each step",
                )
        if any(torch.equal(whole.weights()[name], self._weights[name]) for name in _SHAPES):
            self._refuse("it leaves a parameter as it is", "Have it update all of them")
        if not _equal(part.weights(), _part_of(whole.weights())):
            self._refuse(
                "its update is not elementwise: of a part of a parameter it makes something else "
                "than of the whole, and each worker has a part alone",
                "Use one in which no number depends on another's gradient: no norm, factor or "
                "orthogonalization of a whole parameter",
            )
        again = self._steps(before)
        again.restore(before, len(_RATES) - 1)
        again.step(self._gradients[-1], _RATES[-1])
        if not _equal(again.copy(), whole.copy()):
            self._refuse(
                "from a copy of parameters, moments and step counter it goes on otherwise",
                "Keep all that it remembers in its moments, and use no random numbers",
            )
        return self._counter

    def _check_first_step(self) -> None:
        """What the optimizer keeps, that this begins at zero, and that it is updated in place."""
        params = _parameters(self._weights)
        optimizer = _make(self._config, params, self._compiled)
        for group in optimizer.param_groups:
            group["lr"] = _RATES[0]
        _set_gradients(params, self._gradients[0])
        optimizer.step()
        for param in params.values():
            self._check_state(optimizer.state[param], param)
        ours = self._steps(self._weights)
        ours.step(self._gradients[0], _RATES[0])
        if not ours.in_place():
            self._refuse(
                "it puts other tensors in the place of parameters or moments",
                "Update them in place, as by add_, copy_ and torch's _foreach functions",
            )
        if not _equal(ours.weights(), {name: param.detach() for name, param in params.items()}):
            self._refuse("its moments do not begin at zero", "Use one whose moments do")

    def _check_state(self, state: Mapping[str, Any], param: nn.Parameter) -> None:
        moments, found = sorted(self._config.moments), sorted(set(state) - {"step"})
        if found != moments:
            self._refuse(
                f"its state for a parameter has {found}, its moments are {moments}",
                "Name in `moments` all that it keeps there beside 'step'",
            )
        for moment in moments:
            form, wanted = _form(state[moment]), _form(_empty_moment(self._config, param))
            if form != wanted:
                self._refuse(
                    f"its moment {moment!r} is {form}, and should be {wanted}",
                    "Keep moments that are like their parameter, number for number, or say "
                    "moment_dtype",
                )
        step = state.get("step")
        if step is not None and not (
            isinstance(step, torch.Tensor) and step.dim() == 0 and step == 1
        ):
            self._refuse(
                f"state['step'] is {step!r} after one step",
                "Keep the number of steps done there, as a tensor of no dimension, or nothing",
            )
        self._counter = step

    def _steps(self, weights: _Tensors) -> _Steps:
        return _Steps(self._config, weights, self._counter, self._compiled)

    def _refuse(self, fact: str, fix: str) -> NoReturn:
        raise ConfigError("train.optimizer", self._config, fact, fix)


class _Steps:
    """The trial's parameters under an optimizer whose state was made for it."""

    def __init__(
        self,
        config: Optimizer,
        weights: _Tensors,
        counter: torch.Tensor | None,
        compiled: Compile,
    ) -> None:
        self._params = _parameters(weights)
        self._optimizer = SliceOptimizer(config, self._params, counter, compiled)
        self._weights = self.weights()

    def step(self, gradients: _Tensors, rate: float) -> None:
        """A step with these gradients."""
        _set_gradients(self._params, gradients)
        self._optimizer.step(rate)

    def restore(self, state: _Tensors, steps: int) -> None:
        """Takes over the moments that `copy` gave."""
        for moment, tensors in self._optimizer.moments.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[f"{moment}/{name}"])
        self._optimizer.steps = steps

    def weights(self) -> _Tensors:
        """As they are, sharing memory."""
        return {name: param.detach() for name, param in self._params.items()}

    def copy(self) -> _Tensors:
        """A copy of weights and moments."""
        state = self.weights()
        for moment, tensors in self._optimizer.moments.items():
            state |= {f"{moment}/{name}": tensor for name, tensor in tensors.items()}
        return {name: tensor.clone() for name, tensor in state.items()}

    def in_place(self) -> bool:
        """Whether weights and moments are where they were."""
        state, moments = self._optimizer.inner.state, self._optimizer.moments
        return all(
            param.data_ptr() == self._weights[name].data_ptr()
            and all(state[param].get(m) is tensors[name] for m, tensors in moments.items())
            for name, param in self._params.items()
        )


def _parameters(weights: _Tensors) -> dict[str, nn.Parameter]:
    return {name: as_leaf(weights[name].clone()) for name in _SHAPES}


def _set_gradients(params: Mapping[str, nn.Parameter], gradients: _Tensors) -> None:
    for name, param in params.items():
        param.grad = gradients[name].clone()


def _part_of(tensors: _Tensors) -> _Tensors:
    return {name: tensors[name][where] for name, where in _PARTS.items()}


def _equal(one: _Tensors, other: _Tensors, names: Iterable[str] | None = None) -> bool:
    return all(torch.equal(one[name], other[name]) for name in names or one)


def _form(value: Any) -> Any:
    """What two tensors must have in common for one to be the other's moment; of no tensor, its
    type."""
    return (
        (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else type(value)
    )
