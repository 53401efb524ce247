"""The run's pulse: a small file in the run directory that the coordinator writes anew every few
seconds. Whoever sees only the directory knows from it that the run lives, and how it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from checkpointing.field_types import fits, settle_types
from checkpointing.whole_file import write_whole

PULSE_S = 5.0
"""Between two pulses."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """How a run stands."""

    time: float
    """When this was so, in seconds since the epoch, on the coordinator's machine."""
    steps: int
    """Steps committed."""
    planned_steps: int
    """Steps that the run will have."""
    stepped: float | None
    """When the last step was committed, in seconds since the epoch; None before the first one of
    this start."""
    step_s: float | None
    """Time of a step, over the last ones; None before the second one."""
    replicas: int
    """Replicas that train."""
    min_replicas: int
    """Fewest that it trains with."""
    spares: int
    """Workers that wait for a place."""
    planned_spares: int
    """As many as the run was to have (`scaling.spares`)."""
    spareless_since: float | None
    """Since when none has waited, where the run was to have some."""
    spent: Mapping[str, tuple[int, int]]
    """Budget of `HealthConfig` -> what is used up of it since the last step, and the budget."""


def write_pulse(path: Path, pulse: Pulse) -> None:
    """Writes the file anew, whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(asdict(pulse)) + "\n")


def read_pulse(path: Path) -> Pulse | None:
    """The last pulse; None where there is none, it is out of reach, or of another version."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return _pulse_of(data) if isinstance(data, dict) else None


def _pulse_of(data: Mapping[str, Any]) -> Pulse | None:
    """None where it does not hold what a pulse does: whoever watches must not end for it."""
    told = {field.name: data.get(field.name) for field in fields(Pulse)}
    spent = told["spent"]
    if not isinstance(spent, dict):
        return None
    told["spent"] = pairs = {n: tuple(p) for n, p in spent.items() if isinstance(p, list)}
    pulse = Pulse(**told)  # type: ignore[arg-type]  # looked at next
    if len(pairs) < len(spent) or not all(fits(pair, tuple[int, int]) for pair in pairs.values()):
        return None
    return pulse if settle_types(pulse) is None else None
