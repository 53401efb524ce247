"""Every error the data plane raises, as one tree.

TrainerError
├── ConfigError          what the user wrote cannot work; raised before anything starts
│   ├── RateError        a schedule has no learning rate for a step
│   └── StorageNotSeenError  one machine does not see what a setting names; others may
├── CompileError         a block that must be compiled cannot be, on any worker
├── CompilerFailed       torch's compiler failed here: on one machine, or on all
├── NonFiniteError       too many steps in a row had a non-finite loss or gradient
├── LedgerError          (samples.py) a step committed other samples than it should have
├── TokensCorruptError   (data/index.py) a token file is not what its index says, or not there
├── ExchangeError        a model or state of another system that cannot be read or written
├── DataStorageError     storage of samples falters, and was waited for
├── NetworkError         NCCL goes over TCP on a machine that has EFA
├── GroupError           a process group or its rendezvous failed: a peer may be gone
├── HealError            state that was on its way did not come as it was sent; never leaves a heal
└── CrossGroupLost       a collective across replicas failed or was abandoned: a regroup is due

A message is the fact, the numbers, and the next knob. All of them survive pickling, because they
cross Ray: each keeps its constructor arguments in `args`.
"""

from __future__ import annotations

import os
import sysconfig
import textwrap
import traceback
from pathlib import Path

from checkpointing.field_types import settle_types

_NOT_USERS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(Path(__file__).parents[1] / name for name in ("trainer", "elastic")),
    )
)
"""Where code lies that users have not written."""


class TrainerError(Exception):
    """Base of all errors of the `trainer` package."""


class ConfigError(TrainerError):
    """A setting that cannot work, found before any worker starts.

    Args:
        field: dotted name of the setting, as the user writes it (`"train.global_batch"`).
        value: what was given.
        fact: why it cannot work, with the numbers.
        fix: what to write instead.
    """

    def __init__(self, field: str, value: object, fact: str, fix: str) -> None:
        super().__init__(field, value, fact, fix)
        self.field, self.value, self.fact, self.fix = field, value, fact, fix

    def __str__(self) -> str:
        # A fact may end with another error's words, which are a sentence already.
        value = str(self.value) if isinstance(self.value, Path) else self.value
        return f"{self.field} = {value!r}: {self.fact.removesuffix('.')}. {self.fix}."


class RateError(ConfigError):
    """A schedule has no learning rate for a step: on all workers alike, so it ends the run."""


class StorageNotSeenError(ConfigError):
    """This machine cannot read what a setting names; others may. Raised by a worker before it takes
    part in anything: see `elastic/coordinator/trouble.py` for what follows."""


def describe(error: BaseException) -> str:
    """What there is to say of an exception that is being handled: of one about the settings or the
    compiler its words, of another its traceback. What UTF-8 cannot hold in it, as of the name of a
    file, is escaped: Ray's `sys.stderr` and the run's records would not take it."""
    in_words = isinstance(error, ConfigError | CompilerFailed)
    said = str(error) if in_words else traceback.format_exc()
    return said.encode(errors="backslashreplace").decode()


def blame(error: BaseException) -> str:
    """An exception of the user's code in half a line: what it is, and where in that code it came
    from; where it passed through none of it, where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [one for one in frames if not one.filename.startswith(("<", *_NOT_USERS))]
    text = textwrap.shorten(str(error), 200, placeholder=" …")
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if not frames:
        return what
    last = (users or frames)[-1]
    return f"{what} (line {last.lineno} of {Path(last.filename).name})"


def check_types(config: object, where: str) -> None:
    """Raises ConfigError where a field of the dataclass `config`, which the user writes as
    `where`, has not its declared type."""
    wrong = settle_types(config)
    if wrong is not None:
        raise ConfigError(f"{where}.{wrong.field}", wrong.value, wrong.fact, wrong.fix)


class CompileError(TrainerError):
    """A block, the loss, or the update cannot be compiled. It is the same on all workers.

    Args:
        what: such as `block model.layers.0`.
        fact: why, by torch.
    """

    def __init__(self, what: str, fact: str) -> None:
        super().__init__(what, fact)
        self.what, self.fact = what, fact

    def __str__(self) -> str:
        return (
            f"{self.what} cannot be compiled: {self.fact}. Change its code "
            f"(TORCH_LOGS=graph_breaks says where), keep its shapes the same from micro-batch to "
            f"micro-batch, or use train.compile = 'off'."
        )


class CompilerFailed(TrainerError):
    """What is behind torch.compile has failed on this worker. That may be its machine's doing, so
    nothing falls back: the others would have other bits.

    Args:
        what: such as `block model.layers.0`.
        fact: why, by torch.
    """

    def __init__(self, what: str, fact: str) -> None:
        super().__init__(what, fact)
        self.what, self.fact = what, fact

    def __str__(self) -> str:
        return (
            f"torch's compiler failed on {self.what}: {self.fact}. If it does on one machine only, "
            f"mend that (a C++ compiler, Triton on a GPU, space for what is compiled); if on all, "
            f"change its code, or use train.compile = 'off'."
        )


class NonFiniteError(TrainerError):
    """`count` steps in a row had a non-finite loss or gradient; none of them reached the
    weights."""

    def __init__(self, step: int, count: int, samples: tuple[int, ...]) -> None:
        super().__init__(step, count, samples)
        self.step, self.count, self.samples = step, count, samples

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.samples[:16])) + (", …" if len(self.samples) > 16 else "")
        return (
            f"{self.count} steps in a row up to step {self.step} had a non-finite loss or "
            f"gradient; the samples of step {self.step} are [{shown}]. Look at them, lower "
            f"train.optimizer.lr, or raise health.max_nonfinite_steps."
        )


class ExchangeError(TrainerError):
    """A model or state cannot be taken from, or handed to, another system.

    Args:
        where: the directory or file.
        fact: why, with the numbers.
        fix: what to do instead.
    """

    def __init__(self, where: str, fact: str, fix: str) -> None:
        super().__init__(where, fact, fix)
        self.where, self.fact, self.fix = where, fact, fix

    def __str__(self) -> str:
        return f"{self.where}: {self.fact}. {self.fix}."


class DataStorageError(TrainerError):
    """Samples could not be read because their storage falters; the error that came last is its
    cause.

    Args:
        tries: how often they were read.
        seconds: from the first try to now.
    """

    def __init__(self, tries: int, seconds: float) -> None:
        super().__init__(tries, seconds)
        self.tries, self.seconds = tries, seconds

    def __str__(self) -> str:
        return (
            f"samples could not be read in {self.tries} tries over {self.seconds:.1f} s. Look at "
            f"the storage that the dataset reads, and at this machine's way to it."
        )


class NetworkError(TrainerError):
    """NCCL goes over TCP on a machine that has EFA devices.

    Args:
        instance: the machine's type.
        devices: EFA devices that it has.
        troubles: what NCCL said on the way.
        log: the file with all that it said.
    """

    def __init__(self, instance: str, devices: int, troubles: tuple[str, ...], log: str) -> None:
        super().__init__(instance, devices, troubles, log)
        self.instance, self.devices, self.troubles, self.log = instance, devices, troubles, log

    def __str__(self) -> str:
        said = "; ".join(self.troubles) or "nothing of a failure"
        return (
            f"NCCL goes over TCP on {self.instance} with {self.devices} EFA devices, 10 to 100 "
            f"times slower. It said: {said} ({self.log}). Run `elastic doctor` on the machine, or "
            f"set scaling.allow_tcp to train all the same."
        )


class GroupError(TrainerError, RuntimeError):
    """A process group or its rendezvous failed, or this worker was called away from it. What c10d
    raises itself is a RuntimeError as well."""


class HealError(TrainerError):
    """The other side of a heal is gone or another than it should be, or its bytes are not what was
    sent: the heal begins again. Never leaves its threads."""


class CrossGroupLost(TrainerError):
    """A collective across replicas failed or was abandoned: a regroup is due. Never leaves the
    loop."""
