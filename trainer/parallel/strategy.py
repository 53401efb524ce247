"""The sharding strategy that a layout comes to, by the names of torch's FSDP, and what follows from
it for the loss of a worker. Pure.

    NO_SHARD        each worker holds all parameters that tensor parallelism leaves it
    SHARD_GRAD_OP   gradients and moments are sharded, parameters only from backward to forward
    FULL_SHARD      parameters, too, over all workers of the run, which are one replica
    HYBRID_SHARD    the same inside each of several replicas, of any degree
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.errors import ConfigError
from trainer.parallel.layout import ParallelDims

Strategy = Literal["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All workers of a run: so many replicas, and how each is split."""

    dims: ParallelDims
    """The mesh of one replica."""
    replicas: int
    """With all machines there."""

    @property
    def strategy(self) -> Strategy:
        """What it is called."""
        if self.dims.fsdp == 1:
            return "NO_SHARD"
        if self.dims.regathered == 1:
            return "SHARD_GRAD_OP"
        return "FULL_SHARD" if self.replicas == 1 else "HYBRID_SHARD"

    def check(self, wanted: Strategy | None) -> None:
        """Raises ConfigError where the degrees come to another strategy than the one wanted."""
        if wanted is None or wanted == self.strategy:
            return
        raise ConfigError(
            "train.parallel.strategy",
            wanted,
            f"{self.replicas} replicas of {self.dims} are {self.strategy}",
            _HOW[wanted],
        )

    def __str__(self) -> str:
        return (
            f"{self.strategy}, {self.replicas} replicas of {self.dims}: "
            f"{after_a_loss(self.replicas)}"
        )


_HOW: dict[Strategy, str] = {
    "NO_SHARD": "Use shard = 1 and context = 1",
    "SHARD_GRAD_OP": "Use shard or context above 1, and reshard_after_forward = False or None",
    "FULL_SHARD": "Use max_replicas = 1 and shard = all workers over context and tensor, resharded "
    "after forward",
    "HYBRID_SHARD": "Use max_replicas above 1 and shard or context above 1, resharded after "
    "forward",
}


def after_a_loss(replicas: int) -> str:
    """What the loss of a worker means for so many replicas, in a line."""
    if replicas > 1:
        return "who is lost is made up for in place, while one replica of them is left"
    return (
        "one replica holds the only copy, so nobody is made up for in place: after a loss the run "
        "goes back to a snapshot (checkpoint.memory_every) or a checkpoint"
    )


def beyond_the_lanes(replicas: int, lanes: int) -> str | None:
    """What is to be said of a run that has more replicas than lanes. Pure."""
    if replicas <= lanes:
        return None
    return (
        f"{lanes} lanes keep {lanes} replicas at work: {replicas - lanes} of {replicas} hold the "
        f"state and compute nothing. Use scaling.max_replicas = {lanes}, or, in a new run, "
        f"train.lanes = {replicas}; a run that is continued keeps its lanes"
    )


def plan_regathered(
    reshard_after_forward: bool | int | None, wanted: Strategy | None, fsdp: int, tensor: int
) -> int:
    """Workers over which parameters lie from a block's forward to its backward: all that they are
    sharded over (resharded), 1 (kept whole), or a number between.

    Args:
        reshard_after_forward: as the user has it.
        wanted: likewise.
        fsdp: workers that parameters are sharded over.
        tensor: tensor parallel degree.

    Raises:
        ConfigError: the number cannot be.
    """
    field, given = "train.parallel.reshard_after_forward", reshard_after_forward
    if given is None:
        return 1 if wanted == "SHARD_GRAD_OP" else fsdp
    if isinstance(given, bool):
        return fsdp if given else 1
    if tensor > 1:
        raise ConfigError(
            field,
            given,
            f"FSDP2 cannot reshard to a number of workers beside tensor parallelism ({tensor})",
            "Use True or False",
        )
    if not 1 < given < fsdp or fsdp % given:
        raise ConfigError(
            field,
            given,
            f"it is no divisor of the {fsdp} workers that parameters are sharded over, above 1 and "
            f"below {fsdp}",
            "Use such a number, or True (all of them) or False (1)",
        )
    return given
