"""What the checks look at: this machine, or the files of another."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpointing import is_local, place_of
from elastic.doctor.clock import Clock, read_clock
from health.mounts import temporary_folder
from trainer.backend.efa_facts import EfaFacts, read_efa
from trainer.backend.efa_settings import INSTANCES, InstanceKind


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, from within a process on it."""

    root: Path
    """Where its files begin: `/`, or a copy of them."""
    environment: Mapping[str, str]
    """Of the process."""
    facts: EfaFacts
    """Kind, EFA devices and versions."""
    folders: tuple[Path, ...]
    """Where runs write."""
    memlock_bytes: int | None
    """Memory that the process may lock; None: any."""
    open_files: int | None
    """Files that the process may have open; None: any number."""
    clock: Clock | None
    """What the kernel says of its clock; None: nothing."""

    @property
    def kind(self) -> InstanceKind | None:
        """What a machine of its type has; None for a type that is not known."""
        return INSTANCES.get(self.facts.instance or "")

    @property
    def uses_efa(self) -> bool:
        """Whether NCCL is to go over EFA here."""
        return self.kind is not None and bool(self.facts.devices)


def this_machine(environment: Mapping[str, str], folders: tuple[Path, ...]) -> Machine:
    """The one that this process runs on."""
    return Machine(
        root=Path("/"),
        environment=environment,
        facts=read_efa(),
        folders=folders,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        clock=read_clock(),
    )


def machine_with(storage: Iterable[str]) -> tuple[Machine, tuple[str, ...]]:
    """The one that this process runs on, with the directories of `storage`, and the folder of
    temporary files; and what in `storage` are stores elsewhere."""
    places = tuple(storage)
    local = (Path(str(place_of(place))) for place in places if is_local(place))
    folders = (temporary_folder(), *local)
    stores = tuple(place for place in places if not is_local(place))
    return this_machine(os.environ, folders), stores


def _limit(of: int) -> int | None:
    soft, _ = resource.getrlimit(of)
    return None if soft == resource.RLIM_INFINITY else soft
