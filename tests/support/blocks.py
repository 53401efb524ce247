"""Blocks of steps, for what benchmarks whose systems take turns reckon with."""

from __future__ import annotations

from benchmarks._turns import Block


def block(
    wall_s: float,
    workers_s: float,
    beside_s: float = 0.0,
    own_s: dict[str, float] | None = None,
) -> Block:
    """One that a system did, in so many seconds, and seconds of CPU of its workers and others."""
    return Block(
        wall_s=wall_s,
        workers_cpu_s=workers_s,
        beside_cpu_s=beside_s,
        actors_cpu_s=own_s or {},
        awake_s=wall_s,
        loss=1.0,
    )
