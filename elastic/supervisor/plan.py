"""What a supervisor is given, once for all its lives."""

from __future__ import annotations

from dataclasses import dataclass

from ray.train import RunConfig

from elastic.protocol.job import Job
from elastic.ray_compat.placement import Wanted


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A checked run that is about to start."""

    job: Job
    """What every worker gets."""
    workers: int
    """How many to start with, spares included."""
    wanted: Wanted
    """How many there are when all machines are there."""
    run_config: RunConfig
    """The user's, for Ray Train."""
    prefix: str
    """The names of all that belongs to this start of the run begin with it."""
    began: float
    """The `time` of its `RunStarted`, by which its records are told from those of starts before."""
