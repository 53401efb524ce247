"""Every error the checkpoints raise, as one tree.

CheckpointError
├── CheckpointConfigError     what the user wrote cannot work; raised before anything starts
├── StoreError                the store cannot do what was asked
│   ├── MissingError          no such object
│   └── StoreUnavailableError no permission, no space, no such device; carries the errno
├── CorruptError              bytes that fail their checksum, or a record that does not parse
├── SliceError                a slice does not fit its tensor, or the slices do not tile it
├── NotCommittedError         no checkpoint at that step, or one that cannot become one
├── AlreadyCommittedError     the step has another checkpoint
├── StaleGenerationError      a newer roster has committed; this writer belongs to an old one
├── ProtectedError            a checkpoint that must stay: pinned, or the last one that is sound
├── IncompatibleError         the checkpoint is of another model
└── OtherRecordError          two readers have opened two checkpoints of one step

A message is the fact, the numbers, and the next knob. All of them survive pickling, because they
cross Ray: each keeps its constructor arguments in `args`.
"""

from __future__ import annotations

import errno as numbers

AWAY = frozenset(
    {
        *(numbers.ESTALE, numbers.ENOTCONN, numbers.ETIMEDOUT, numbers.EREMOTEIO),
        *(numbers.EHOSTDOWN, numbers.EHOSTUNREACH, numbers.ENETDOWN, numbers.ENETUNREACH),
        *(numbers.ECONNREFUSED, numbers.ECONNRESET, numbers.ECONNABORTED, numbers.ENETRESET),
        numbers.ESHUTDOWN,
    }
)
"""What a file system says while its server is away. ENOTCONN: a FUSE mount's process has ended;
ESHUTDOWN: Lustre has evicted this machine."""


class CheckpointError(Exception):
    """Base of all errors of the `checkpointing` package."""


class CheckpointConfigError(CheckpointError):
    """A setting that cannot work, found before any worker starts.

    Args:
        field: dotted name of the setting, as the user writes it (`"checkpoint.keep_last"`).
        value: what was given.
        fact: why it cannot work, with the numbers.
        fix: what to write instead.
    """

    def __init__(self, field: str, value: object, fact: str, fix: str) -> None:
        super().__init__(field, value, fact, fix)
        self.field, self.value, self.fact, self.fix = field, value, fact, fix

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.fact.removesuffix('.')}. {self.fix}."


class StoreError(CheckpointError):
    """The store cannot do what was asked. `where` is a key, a path or a URL."""

    def __init__(self, where: str, fact: str) -> None:
        super().__init__(where, fact)
        self.where, self.fact = where, fact

    def __str__(self) -> str:
        return f"{self.where}: {self.fact}."


class MissingError(StoreError):
    """No object under that key."""


class StoreUnavailableError(StoreError):
    """The operating system or the service refuses, or does not answer; `errno` says how, where
    there is one.

    Args:
        where: a key, a path or a URL.
        errno: the operating system's number; None for none.
        fact: why, with the next knob.
        may_pass: the service did not answer, or not in time: nothing needs to be changed. Of a file
            system its number says so.
    """

    def __init__(self, where: str, errno: int | None, fact: str, *, may_pass: bool = False) -> None:
        super().__init__(where, fact)
        self.args = (where, errno, fact)
        self.errno, self.may_pass = errno, may_pass or errno in AWAY

    def __reduce__(self) -> tuple[object, ...]:
        """With what is no argument by place."""
        return type(self), self.args, {"may_pass": self.may_pass}

    def __str__(self) -> str:
        errno = "" if self.errno is None else f" (errno {self.errno})"
        return f"{self.where}: {self.fact}{errno}."


class CorruptError(CheckpointError):
    """An object that is not what was written.

    Args:
        key: the object's key.
        fact: what is wrong with it.
        block: number of the bad CRC block, where one is known.
        byte_range: first byte and end of the bad bytes, where known.
    """

    def __init__(
        self,
        key: str,
        fact: str,
        block: int | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(key, fact, block, byte_range)
        self.key, self.fact, self.block, self.byte_range = key, fact, block, byte_range

    def __str__(self) -> str:
        if self.block is None or self.byte_range is None:
            return f"{self.key}: {self.fact}."
        start, stop = self.byte_range
        return (
            f"{self.key}: block {self.block} (bytes {start} to {stop}): {self.fact}. Restore an "
            f"older step, and check the storage it lies on."
        )


class SliceError(CheckpointError):
    """A slice does not fit its tensor, or the slices of a tensor do not cover it exactly once."""

    def __init__(self, name: str, fact: str) -> None:
        super().__init__(name, fact)
        self.name, self.fact = name, fact

    def __str__(self) -> str:
        return f"tensor {self.name!r}: {self.fact}."


class NotCommittedError(CheckpointError):
    """There is no checkpoint at `step`, or what was handed in cannot become one."""

    def __init__(self, step: int, fact: str) -> None:
        super().__init__(step, fact)
        self.step, self.fact = step, fact

    def __str__(self) -> str:
        return f"step {self.step} is not committed: {self.fact}."


class AlreadyCommittedError(CheckpointError):
    """`step` has a commit record with another content; the first one stands."""

    def __init__(self, step: int, fact: str) -> None:
        super().__init__(step, fact)
        self.step, self.fact = step, fact

    def __str__(self) -> str:
        return (
            f"step {self.step} is already committed: {self.fact}. The first commit stands; resume "
            f"from it, or give this run a directory of its own."
        )


class StaleGenerationError(CheckpointError):
    """A commit from a roster that has been replaced; nothing was published."""

    def __init__(
        self, step: int, generation: int, newest_step: int, newest_generation: int
    ) -> None:
        super().__init__(step, generation, newest_step, newest_generation)
        self.step, self.generation = step, generation
        self.newest_step, self.newest_generation = newest_step, newest_generation

    def __str__(self) -> str:
        return (
            f"step {self.step} of generation {self.generation} was not published: generation "
            f"{self.newest_generation} has committed step {self.newest_step}. This writer belongs "
            f"to an old roster; join again."
        )


class ProtectedError(CheckpointError):
    """The checkpoint of `step` must not be deleted; `fix` says what lifts that."""

    def __init__(self, step: int, fact: str, fix: str) -> None:
        super().__init__(step, fact, fix)
        self.step, self.fact, self.fix = step, fact, fix

    def __str__(self) -> str:
        return f"step {self.step} was not deleted: {self.fact}. {self.fix}."


class IncompatibleError(CheckpointError):
    """The checkpoint is of another model.

    Args:
        name: the first tensor, in name order, that differs.
        fact: how it differs, and perhaps how the next ones do.
        count: how many tensors differ.
    """

    def __init__(self, name: str, fact: str, count: int = 1) -> None:
        super().__init__(name, fact, count)
        self.name, self.fact, self.count = name, fact, count

    def __str__(self) -> str:
        return (
            f"tensor {self.name!r}: {self.fact} ({self.count} tensors differ). Use the "
            f"configuration that wrote the checkpoint, or another checkpoint directory."
        )


class OtherRecordError(CheckpointError):
    """Readers of one checkpoint have opened records that differ; `sha256` is of the one here."""

    def __init__(self, step: int, sha256: str) -> None:
        super().__init__(step, sha256)
        self.step, self.sha256 = step, sha256

    def __str__(self) -> str:
        return (
            f"step {self.step}: the record here has the SHA-256 {self.sha256[:16]}, and another "
            f"reader has opened another record. Mount the same storage on every node."
        )
