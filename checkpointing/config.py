"""What the user writes about checkpoints. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from checkpointing.errors import CheckpointConfigError, StoreError
from checkpointing.field_types import settle_types
from checkpointing.format.layout import SEGMENT_BYTES
from checkpointing.stores import StorePlace, place_of
from checkpointing.stores.s3.config import S3Config

Resume = Literal["auto", "never", "must"]

_MIN_SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, how long they stay, and whether a run starts from one.

    Raises:
        CheckpointConfigError: a value that cannot work.
    """

    every_steps: int | Literal["auto"] | None = 100
    """Steps from one checkpoint to the next; None writes only the one at the end of the run.
    "auto": so often that least time is lost, by what a save costs and how often workers are lost,
    within the bounds below."""

    auto_least_s: float = 60.0
    """With "auto", the least time from one checkpoint to the next."""

    auto_most_s: float = 3600.0
    """With "auto", the most time from one checkpoint to the next."""

    auto_mtbf_s: float = 6 * 3600.0
    """With "auto", the time between losses of workers to reckon with until some were seen."""

    memory_every: int | None = None
    """Steps from one snapshot in the nodes' memory to the next: at most so many are lost where no
    worker has the state any more, and those done while a snapshot was on its way. It takes up to
    four times a node's share of the state in /dev/shm; None takes no snapshots."""

    keep_last: int = 2
    """How many of the newest checkpoints stay. Pinned ones stay beside them, and so do the newest
    one and the newest verified one."""

    keep_every: int | None = None
    """Checkpoints at multiples of this many steps, itself a multiple of `every_steps`, stay for
    good; None keeps none for good."""

    resume: Resume = "auto"
    """`auto` starts from the newest checkpoint, or newer snapshot, if there is one, `must` fails if
    there is none, `never` starts from step 0, each time: it moves an earlier run of the name aside,
    and is refused where `store` has checkpoints of one."""

    segment_bytes: int = SEGMENT_BYTES
    """Bound on the tensor bytes in one file of a checkpoint; 1 MiB or more."""

    store: str | S3Config | StorePlace | None = None
    """Where checkpoints go: `s3://BUCKET/PREFIX`, a directory, or a URL of an installed kind of
    store; below it every run has its name. An `S3Config` where a URL is not enough. None: the run's
    directory."""

    def __post_init__(self) -> None:
        wrong = settle_types(self)
        if wrong is not None:
            raise CheckpointConfigError(
                f"checkpoint.{wrong.field}", wrong.value, wrong.fact, wrong.fix
            )
        if self.fixed_steps is not None:
            _at_least("every_steps", self.fixed_steps, 1)
        if self.memory_every is not None:
            _at_least("memory_every", self.memory_every, 1)
        _at_least("keep_last", self.keep_last, 1)
        if self.keep_every is not None:
            _at_least("keep_every", self.keep_every, 1)
        _at_least("segment_bytes", self.segment_bytes, _MIN_SEGMENT_BYTES)
        self._check_keep_every()
        self._check_auto()
        self.place("")

    @property
    def fixed_steps(self) -> int | None:
        """Steps between checkpoints, where that is a number."""
        return None if self.every_steps == "auto" else self.every_steps

    def place(self, run: str) -> StorePlace | None:
        """The store of the checkpoints of `run`; None where they lie in its directory."""
        if self.store is None or isinstance(self.store, StorePlace):
            return self.store and self.store.below(run)
        try:
            return place_of(self.store).below(run)
        except StoreError as error:
            raise CheckpointConfigError(
                "checkpoint.store",
                error.where,
                error.fact,
                "docs/extending.md has how to add a kind",
            ) from error

    def _check_auto(self) -> None:
        for field in ("auto_least_s", "auto_most_s", "auto_mtbf_s"):
            value = getattr(self, field)
            if not value > 0:
                raise CheckpointConfigError(
                    f"checkpoint.{field}", value, "not a positive number", "Write seconds"
                )
        if self.auto_least_s > self.auto_most_s:
            raise CheckpointConfigError(
                "checkpoint.auto_least_s",
                self.auto_least_s,
                f"above checkpoint.auto_most_s = {self.auto_most_s:g}",
                f"Write {self.auto_most_s:g} or less",
            )

    def _check_keep_every(self) -> None:
        if self.keep_every is None or self.every_steps is None:
            return
        if self.every_steps == "auto":
            raise CheckpointConfigError(
                "checkpoint.keep_every",
                self.keep_every,
                "with every_steps = 'auto' nobody knows which steps have a checkpoint",
                "Write None and pin what is to stay, or a number of steps in every_steps",
            )
        if self.keep_every % self.every_steps:
            raise CheckpointConfigError(
                "checkpoint.keep_every",
                self.keep_every,
                f"not a multiple of checkpoint.every_steps = {self.every_steps}, so most of these "
                f"steps have no checkpoint to keep",
                f"Write a multiple of {self.every_steps}",
            )


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise CheckpointConfigError(
            f"checkpoint.{field}",
            value,
            f"not a whole number of at least {least}",
            f"Write {least} or more",
        )
