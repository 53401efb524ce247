"""Two members of a group across replicas on a CPU, each on a thread of its own."""

from __future__ import annotations

from trainer.backend.rendezvous import Rendezvous
from trainer.replication.replicas import CrossGroup


def join_pair(meet: Rendezvous, rank: int) -> CrossGroup:
    """The member of that rank; returns when the other one is there, too."""
    return CrossGroup(
        meet,
        "cross",
        lanes=[(0,), (1,)],
        total_lanes=2,
        rank=rank,
        device="cpu",
        leave_now=lambda: False,
    )
