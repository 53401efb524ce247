"""Whether a user's loss is a sum and a count, leaves the model as it was, and can be computed with
the bits that the run promises: tried on the driver, before anything starts.

Of random numbers those of torch alone are the run's: it is seeded before each micro-batch."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpointing.field_types import type_name
from trainer.errors import ConfigError, blame

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.backend.determinism import Determinism
    from trainer.tasks.task import PreparedTask

log = logging.getLogger(__name__)

_SAMPLES = 2
_LONGEST_S = 1.5
_SEEDS = 2_914_350_666, 2_914_350_667
"""Of the generators, where the loss is tried and where it is tried once more: the same at each
start, which so come to the same. Nobody's script has seeded them so."""
_PIECE_BYTES = 1 << 20


def try_loss(task: PreparedTask, model: nn.Module, determinism: Determinism) -> None:
    """Calls the loss on the first samples. Where it raises here, which is a warning, or takes long,
    nothing is known: it may need what only the workers have, and they will tell.

    Args:
        task: whose loss and data.
        model: whole, on the CPU.
        determinism: of the run.

    Raises:
        ConfigError: it returns something else than the sum of the losses and their number; it
            changes a buffer or a parameter of the model; in `strict`, it raises there and not
            without, or it depends on a generator that nobody seeds.
    """
    import torch

    from trainer.data.batches import to_device
    from trainer.models.init import saved_buffers

    model.train()  # as the workers' is, whatever it was made as
    before = {name: buffer.clone() for name, buffer in saved_buffers(model).items()}
    writes = _writes(model)
    answers: list[Any] = []
    errors: list[BaseException] = []
    draws: list[_Draws] = []

    def call(seed: int, over: threading.Event) -> None:
        data, drawn = task.train_data(), _Draws()
        ids = np.arange(min(_SAMPLES, len(data)))
        for strict in (True, False) if determinism == "strict" else (False,):
            try:
                if over.is_set():  # the generators are the script's again
                    return
                with _deterministic(strict):
                    with _watched(drawn, "dataset", seed):
                        batch = data.batch(ids)
                    batch = to_device(batch, torch.device("cpu"))  # as workers see it
                    if over.is_set():
                        return
                    with _watched(drawn, "loss_function", seed):
                        answers.append(task.loss(model, batch))
                draws.append(drawn)
                return
            except BaseException as error:  # the user's code
                errors.append(error)

    def run(seed: int) -> bool:
        """Returns whether it came to an end."""
        over = threading.Event()
        with torch.random.fork_rng(devices=[]), _kept_generators():
            thread = threading.Thread(target=call, args=(seed, over), name="try-loss", daemon=True)
            thread.start()
            thread.join(_LONGEST_S)
            over.set()
        return not thread.is_alive()

    if run(_SEEDS[0]) and errors and not answers:
        log.warning(
            "on this machine the loss raised %s. The workers will try it: mend it, unless it needs "
            "what only they have",
            blame(errors[-1]),
        )
    if answers and errors:
        raise ConfigError(
            "train.determinism",
            determinism,
            "with deterministic algorithms the loss raises, without them it does not: "
            + str(errors[0]).partition(", but")[0],
            "Use another operator in the model or the loss, or determinism='fast'",
        )
    if answers and (fact := _what_is_wrong(answers[0])) is not None:
        raise ConfigError(
            "train.task.loss_function",
            getattr(task, "loss_function", task.loss),
            fact,
            "Return the sum of the losses, a scalar tensor with gradient, and how many they are",
        )
    if answers and (changed := _changed(before, saved_buffers(model))):
        raise ConfigError(
            "train.task.build_model",
            changed[0],
            "the loss changes this buffer; what is kept in buffers is neither healed nor saved, "
            "and each replica has its own",
            "Keep no state between steps but what the optimizer changes. A cache is registered "
            "with persistent=False",
        )
    after = _writes(model) if answers else writes
    if written := [name for name, of in after.items() if of != writes.get(name)]:
        raise ConfigError(
            "train.task.build_model",
            written[0],
            "the loss changes this parameter; replicas compute the loss of other samples, and "
            "of some once more to confirm each other, so each would have its own",
            "Have the optimizer alone change parameters: an average of them (a teacher), or "
            "weights that are normalised in place, cannot be kept",
        )
    if draws and draws[0] and run(_SEEDS[1]) and len(draws) > 1:
        # Both begin with the same state of torch's generator.
        first, again = (answer[0].detach() for answer in (answers[0], answers[-1]))
        differs = not torch.allclose(first, again, rtol=0, atol=0, equal_nan=True)
        _check_draws(task, determinism, *draws, differs=differs)


_Draws = dict[tuple[str, str], object]
"""Where a generator stood afterwards, by the field of the task and whose it is; of those alone that
were drawn from."""


def _places() -> dict[str, object]:
    """Where the generators stand that the run does not seed, by whose they are."""
    kind, keys, *rest = np.random.get_state()
    return {"Python": random.getstate(), "NumPy": (kind, np.asarray(keys).tobytes(), *rest)}


@contextmanager
def _watched(drawn: _Draws, field: str, seed: int) -> Iterator[None]:
    """Notes in `drawn` what is drawn from in the block. `seed`: where they begin."""
    random.seed(seed)
    np.random.seed(seed)
    before = _places()
    yield
    drawn.update({(field, of): at for of, at in _places().items() if at != before[of]})


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Puts them back."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def _check_draws(
    task: PreparedTask, determinism: Determinism, first: _Draws, again: _Draws, *, differs: bool
) -> None:
    """Whoever seeds a generator by the index before it draws ends where it did before, wherever the
    generator stood; all others have other numbers on each worker. Where the loss does not differ
    that may be of no account, as of a library that draws the name of a file: a warning."""
    for field, of in first:
        if first[field, of] == again.get((field, of), first[field, of]):
            continue
        strict, given = determinism == "strict", getattr(task, field, task.loss)
        refusal = ConfigError(
            f"train.task.{field}",
            given if callable(given) else type_name(given),
            f"it draws from {of}'s generator, which is not seeded: where the loss depends on it, "
            "whoever does a step again has other numbers"
            + (", and a sound replica is called corrupt" if strict else ""),
            "Draw from torch's generator, or from one of its own that the index seeds"
            + (", or use determinism='fast'" if strict else ""),
        )
        if strict and differs:
            raise refusal
        log.warning("%s", refusal)


def _changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of those whose bits are not what they were."""
    import torch

    return [
        name
        for name, tensor in after.items()
        if name not in before
        or (tensor.shape, tensor.dtype) != (before[name].shape, before[name].dtype)
        or not torch.equal(_bits(tensor), _bits(before[name]))
    ]


def _writes(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """How often each parameter has been written to, as a teacher that still equals its student has
    the bits that it had; and the sum of its bytes, as a write to `.data` is not counted. A copy
    would need the model's memory once more."""
    import torch

    def of(param: torch.Tensor) -> tuple[object, ...]:
        # In pieces: torch makes a copy of eight bytes for each.
        total = sum(int(piece.sum(dtype=torch.int64)) for piece in _bits(param).split(_PIECE_BYTES))
        return param._version, param.shape, param.dtype, total

    return {name: of(param) for name, param in model.named_parameters()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@contextmanager
def _deterministic(strict: bool) -> Iterator[None]:
    import torch

    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if strict else "default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _what_is_wrong(answer: Any) -> str | None:
    import torch

    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return f"it returns {type(answer).__name__}, not a sum and a count"
    loss, count = answer
    if not isinstance(loss, torch.Tensor):
        return f"its sum is of type {type(loss).__name__}, not a tensor"
    if loss.dim() != 0:
        return f"its sum is a tensor of shape {tuple(loss.shape)}, not a scalar"
    if not loss.requires_grad:
        return "its sum has no gradient"
    if not isinstance(count, Real) or isinstance(count, bool):
        return f"its count is of type {type(count).__name__}, not a number"
    if count % 1:
        return f"its count is {count}, not a whole number"
    return None
