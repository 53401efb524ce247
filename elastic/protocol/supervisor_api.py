"""What others may ask of a run's supervisor (`elastic/supervisor/supervisor.py`), and where it is
found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.protocol.causes import Cause
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.job import Job
from elastic.protocol.rpc import Remote

WAIT_S = 30.0
"""How long whoever waits for the end of a run does so in one call."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended."""

    error: str | None
    """Why it failed; None where it did not."""
    cause: Cause | None = None
    """See `Stop`."""
    interrupted: bool = False
    """Somebody has ended it at once, whatever its records say: its coordinator may be gone."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What whoever attaches to a run must know of it."""

    job: Job
    """What its workers were given; without the task."""
    task_info: Mapping[str, Any]
    """What the prepared task says of itself."""


class SupervisorApi(Protocol):
    """Make each call by `Remote[SupervisorApi]`. All are idempotent."""

    async def about(self) -> About:
        """What run this is."""

    async def coordinator(self) -> Remote[CoordinatorApi]:
        """The run's. For whoever cannot load what `about` tells: settings may hold objects of the
        user's own modules."""

    async def going_on(self) -> bool:
        """Whether the run has not ended."""

    async def interrupt(self) -> None:
        """The run ends at once, without a checkpoint."""

    async def ending(self, timeout_s: float) -> Ending | None:
        """Waits for the end of the run, which has left the run directory by then. None where it
        does not come in time: nobody who has left keeps a call of the actor for longer."""
