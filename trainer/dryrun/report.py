"""What a dry run comes to: does the layout fit? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer.dryrun.machines import Machine, beside_tensors
from trainer.dryrun.on_nodes import Misfit
from trainer.dryrun.rank import RankNeeds
from trainer.dryrun.watch import NODE, NODES

_TIGHT = (0.9, 1.1)
"""Shares of the memory between which a dry run may be wrong."""

_OF_HOST = 0.5
"""Share of a machine's own memory that activations may take: the other half is for snapshots, lanes
that wait there, data and the processes."""

Verdict = Literal["fits", "tight", "too large", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A worker's needs beside what there is."""

    needs: RankNeeds
    """Of the first worker, which needs most."""
    workers: int
    """Of the whole layout, spares not counted."""
    machine: Machine | None
    """Where they are; None: on a CPU."""
    nodes: int | None
    """How many machines; None: as many as it takes."""
    misfits: Sequence[Misfit] = ()
    """What of the layout does not go with them."""

    @property
    def components(self) -> dict[str, int]:
        """Bytes by what they are for. The last three are no part of a step's peak."""
        called = {call.group for call in self.needs.collectives if call.ranks > 1}
        groups = len({"shard" if group in (NODES, NODE) else group for group in called})
        groups += "regather" in called  # FSDP2 has one of those who hold equal parts, and no use
        more = max(0, self.needs.evaluation_bytes - self.needs.peak_bytes)
        beside = beside_tensors(self.needs.peak_bytes + more, groups) if self.machine else 0
        return {
            **self.needs.components,
            "evaluation": more,
            "fault_reserve": self.needs.fault_reserve_bytes,
            "device": beside,
        }

    @property
    def needed_bytes(self) -> int:
        """All that must be there."""
        return sum(self.components.values())

    @property
    def memory_refused(self) -> bool:
        """Whether it is beyond doubt that it will not fit."""
        if self.machine is None:
            return False
        too_large = self.needed_bytes > _TIGHT[1] * self.machine.memory_bytes
        return too_large or self.lacks_host_memory

    @property
    def gpus(self) -> int | None:
        """There are so many; None: unknown."""
        return (
            None if self.machine is None or self.nodes is None else self.machine.gpus * self.nodes
        )

    @property
    def lacks_gpus(self) -> bool:
        """Whether there are fewer than workers."""
        return self.gpus is not None and self.gpus < self.workers

    @property
    def misfit_refused(self) -> bool:
        """Whether a start on the GPUs of such machines would refuse the layout: an autoscaler that
        could bring larger ones is not known here."""
        return any(misfit.refused for misfit in self.misfits)

    @property
    def offloaded_bytes(self) -> int:
        """Activations in the memory of one machine, of all its workers."""
        there = 1 if self.machine is None else min(self.machine.gpus, self.workers)
        return self.needs.offloaded_bytes * there

    @property
    def lacks_host_memory(self) -> bool:
        """Whether those are more than the machine has room for; not where its memory is unknown."""
        size = None if self.machine is None else self.machine.host_memory_bytes
        return size is not None and self.offloaded_bytes > _OF_HOST * size

    @property
    def fits(self) -> bool | None:
        """Whether memory and machines are enough, and hold what must be on one of them; None where
        the memory is unknown."""
        if self.machine is None:
            return None
        lacks = self.lacks_gpus or self.lacks_host_memory or self.misfit_refused
        return self.needed_bytes <= self.machine.memory_bytes and not lacks

    @property
    def verdict(self) -> Verdict:
        """On the memory alone, in a word."""
        if self.machine is None:
            return "unknown"
        share = self.needed_bytes / self.machine.memory_bytes
        return "fits" if share < _TIGHT[0] else "tight" if share <= _TIGHT[1] else "too large"

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "fits": self.fits,
            "verdict": self.verdict,
            "peak_bytes": self.needs.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "memory_bytes": None if self.machine is None else self.machine.memory_bytes,
            "components": self.components,
            "offloaded_bytes": self.offloaded_bytes,
            "host_memory_bytes": None if self.machine is None else self.machine.host_memory_bytes,
            "collectives": [asdict(collective) for collective in self.needs.collectives],
            "host_syncs": self.needs.host_syncs,
            "parameters": self.needs.parameters,
            "workers": self.workers,
            "gpus": self.gpus,
            "misfits": [str(misfit) for misfit in self.misfits],
        }
