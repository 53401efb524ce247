"""Workers of other versions than the run's get no place. Pure.

Who computes with another torch comes to other bits, and would be taken for corrupt; another NCCL
may not connect. The run's versions are those of its workers, not the driver's, whose machine may
have no GPU: of most that wait when the first replicas form. They stay, until the run is stopped and
started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from elastic.protocol.messages import Versions

_FIX = (
    "its bits would be others, or NCCL would not connect. Give its node the image of the others; "
    "or stop the run, and start it again: it takes the versions of most that are there then"
)


def decide_versions(told: Iterable[Versions]) -> Versions:
    """The run's: those of most of its workers; of equally many, those that were told first."""
    ((versions, _),) = Counter(told).most_common(1)
    return versions


def describe_difference(mine: Versions, runs: Versions) -> str:
    """What a worker has that the run's others have not, and what to do."""
    has, wanted = dict(mine), dict(runs)
    differing = [name for name in {**wanted, **has} if has.get(name) != wanted.get(name)]
    shown = ", ".join(
        f"{name} {has.get(name, 'unknown')} where the run has {wanted.get(name, 'none')}"
        for name in differing
    )
    return f"{shown}: {_FIX}"
