"""What the commit records of a store refer to: the facts that retention decides by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from checkpointing.claims import importing_steps
from checkpointing.commit import SET_ASIDE, list_steps, load_manifest
from checkpointing.errors import CorruptError, NotCommittedError
from checkpointing.layout import Keys
from checkpointing.manifest import Manifest
from checkpointing.stores import Store
from checkpointing.verified import verified_at


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the commit records of a store refer to."""

    segments: Mapping[int, frozenset[str]]
    """Step -> keys, for each record that can be read."""
    unreadable: frozenset[int]
    """Steps whose record is damaged or of a later schema."""
    set_aside: frozenset[int] = frozenset()
    """Steps of such records that a run has moved out of its way."""
    verified: frozenset[int] = frozenset()
    """Steps that were read and checked in whole."""
    importing: frozenset[int] = frozenset()
    """Steps that somebody may be importing."""

    @property
    def steps(self) -> list[int]:
        """Steps that have a record, ascending."""
        return sorted({*self.segments, *self.unreadable})

    def without(self, step: int) -> Survey:
        """The survey once the record of `step` is gone."""
        return replace(
            self,
            segments={s: keys for s, keys in self.segments.items() if s != step},
            unreadable=self.unreadable - {step},
            verified=self.verified - {step},
            importing=self.importing - {step},
        )


@dataclass(kw_only=True)
class Surveyor:
    """Takes surveys. A record never changes, so each is read only once."""

    store: Store
    """Where the records are."""
    keys: Keys
    """Names in the store."""
    _known: dict[int, Manifest] = field(default_factory=dict)

    def survey(self) -> Survey:
        """What there is now.

        Claims are read before records: an import lets go of its claim when its record is there.
        """
        importing = importing_steps(self.store, self.keys)
        present, unreadable = set(list_steps(self.store, self.keys)), set[int]()
        self._known = {step: m for step, m in self._known.items() if step in present}
        for step in present - self._known.keys():
            try:
                self._known[step] = load_manifest(self.store, self.keys, step)
            except CorruptError:
                unreadable.add(step)
            except NotCommittedError:
                continue  # deleted meanwhile
        return Survey(
            segments={step: frozenset(m.segments) for step, m in self._known.items()},
            unreadable=frozenset(unreadable),
            set_aside=frozenset(self._set_aside()),
            verified=frozenset(self._verified()),
            importing=importing,
        )

    def forget(self, step: int) -> None:
        """The record of `step` was deleted, or may be another one now."""
        self._known.pop(step, None)

    def _set_aside(self) -> set[int]:
        listed = self.store.list(self.keys.commits)
        steps = (self.keys.step_of(key) for key in listed if key.endswith(f".json{SET_ASIDE}"))
        return {step for step in steps if step is not None}

    def _verified(self) -> Iterable[int]:
        listed = set(self.store.list(self.keys.commits))
        for step, manifest in self._known.items():
            noted = self.keys.verified(step) in listed
            if noted and verified_at(self.store, self.keys, manifest) is not None:
                yield step
