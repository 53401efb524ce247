"""What a worker is doing, by name: heartbeats show it, and injected faults are placed by it.

The first ten are passed in every step, in this order; the others belong to the life round it.
"""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal[
    "data",
    "forward",
    "backward",
    "reduce",
    "before_commit",
    "in_commit",
    "after_commit",
    "optimizer",
    "checkpoint",
    "evaluation",
    "build",
    "regroup",
    "heal_source",
    "heal_target",
    "wait",
    "shutdown",
]
"""`build`: making a replica's process group and model. `regroup`: making the group across replicas.
`wait`: without a slot, or called to join."""

PHASES: tuple[Phase, ...] = get_args(Phase)
