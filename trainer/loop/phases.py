"""What a worker is doing, by name: heartbeats show it, and injected faults are placed by it.

The first eight, `STEP_PHASES`, are passed in every step, in this order, the first three of them
once for each micro-batch; one that compiles is in `compile` in place of forward and backward. A
worker without lanes skips those three, one without state the optimizer. The others belong to the
life round it. A worker is in `reduce`, too, while it waits for others to compare their states or to
evaluate; and in `heal_source`, or `checkpoint`, while its optimizer waits for a copy of its state
for newcomers, or for a save.
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
    "profile",
    "build",
    "compile",
    "regroup",
    "heal_source",
    "heal_target",
    "wait",
    "shutdown",
]
"""`checkpoint`: handing over what is saved. `evaluation`: entered with each batch. `profile`:
beginning to profile, or writing down what was found. `build`: making a replica's process group and
model. `compile`: compiling a model's blocks, before its first step, or in that step's first micro-
batch; evaluations compile nothing. `regroup`: making the group across replicas. `heal_source`,
`heal_target`: beginning to send or to receive state; both go on beside the steps; the latter also
where a newcomer then applies the steps that it lacks. `wait`: at the end, until what was saved is
stored; and in `join`, without a slot or called there."""

PHASES: tuple[Phase, ...] = get_args(Phase)

STEP_PHASES: tuple[Phase, ...] = PHASES[: PHASES.index("optimizer") + 1]

COMPUTING = frozenset(map(PHASES.index, ("data", "forward", "backward")))
"""Numbers of those that a worker without lanes, as a newcomer is, passes over."""
