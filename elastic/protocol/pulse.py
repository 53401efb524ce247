"""The run's pulse: a small file in the run directory that the coordinator writes anew every few
seconds. Whoever sees only the directory knows from it that the run lives, and how it stands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

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
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(asdict(pulse)) + "\n")
    os.replace(beside, path)


def read_pulse(path: Path) -> Pulse | None:
    """The last pulse; None where there is none, it is out of reach, or of another version."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return _pulse_of(data) if isinstance(data, dict) else None


def _pulse_of(data: Mapping[str, Any]) -> Pulse | None:
    """None where it does not hold what a pulse does: whoever watches must not end for it."""
    numbers = {field.name: data.get(field.name) for field in fields(Pulse) if field.name != "spent"}
    spent = data.get("spent")
    if not isinstance(spent, dict) or not all(_is_pair(one) for one in spent.values()):
        return None
    if not all(_is_number(n) or (n is None and name in _MAY_LACK) for name, n in numbers.items()):
        return None
    pairs = {name: (used, most) for name, (used, most) in spent.items()}
    return Pulse(**numbers, spent=pairs)  # type: ignore[arg-type]  # looked at just now


_MAY_LACK = frozenset({"stepped", "step_s", "spareless_since"})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
