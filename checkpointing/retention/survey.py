"""What the commit records of a store refer to: the facts that retention decides by."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from checkpointing.errors import CorruptError, MissingError, NotCommittedError
from checkpointing.format.layout import Keys
from checkpointing.format.manifest import Manifest
from checkpointing.read.catalogue import SET_ASIDE, is_foreign, list_steps, load_manifest
from checkpointing.retention.claims import claimed_steps
from checkpointing.retention.verified_mark import verified_at
from checkpointing.stores import Store

_READS = 4
"""Records read at once: a coordinator's first retention reads all that are kept, from a store that
may be slow. One may take 100 MB."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the commit records of a store refer to."""

    segments: Mapping[int, frozenset[str]]
    """Step -> keys, for each record that can be read."""
    unreadable: frozenset[int]
    """Steps whose record is damaged or of a later schema."""
    set_aside: frozenset[int] = frozenset()
    """Steps of such records that a run has moved out of its way."""
    aside: frozenset[str] = frozenset()
    """Segments of sound records that were: they are not the run's own, or it went back for them."""
    verified: frozenset[int] = frozenset()
    """Steps that were read and checked in whole."""
    pinned: frozenset[int] = frozenset()
    """Steps that somebody has claimed to keep; of some there may be no record."""
    importing: frozenset[int] = frozenset()
    """Steps that somebody may be importing."""

    @property
    def steps(self) -> list[int]:
        """Steps that have a record, ascending."""
        return sorted({*self.segments, *self.unreadable})

    def guards(self, before: Survey) -> bool:
        """Whether all is there that protected segments at `before` without a sound record of the
        run's own. If not, there may be some that nothing refers to."""
        return (
            before.unreadable <= self.unreadable
            and before.set_aside <= self.set_aside
            and before.aside <= self.aside
            and before.importing <= self.importing
        )

    def holds(self, before: Survey) -> bool:
        """Whether all is there that protected segments at `before`; both are of one `Surveyor`."""
        same = all(self.segments.get(step) is named for step, named in before.segments.items())
        return same and self.guards(before)

    def without(self, step: int) -> Survey:
        """The survey once the record of `step` is gone."""
        return replace(
            self,
            segments={s: keys for s, keys in self.segments.items() if s != step},
            unreadable=self.unreadable - {step},
            verified=self.verified - {step},
            importing=self.importing - {step},
        )


@dataclass(frozen=True, kw_only=True)
class _Record:
    segments: frozenset[str]
    sha256: str


@dataclass(kw_only=True)
class Surveyor:
    """Takes surveys. A record never changes, so each is read only once. While one is taken, another
    thread may call `forget`."""

    store: Store
    """Where the records are."""
    keys: Keys
    """Names in the store."""
    last: Survey | None = None
    """What the last retention left, if all went well: since then nothing lay about."""
    _known: dict[int, _Record] = field(default_factory=dict)
    _aside_known: dict[str, frozenset[str] | None] = field(default_factory=dict)

    def survey(self, *, verified: bool = True) -> Survey:
        """What there is now; without `verified` the notes of what was checked are not read.

        Claims are read before records: an import lets go of its claim when its record is there.
        """
        pinned, importing = claimed_steps(self.store, self.keys)
        present, unreadable = set(list_steps(self.store, self.keys)), set[int]()
        known = self._known.copy()
        for step in known.keys() - present:
            del known[step]
            self.forget(step)
        new = sorted(present - known.keys())
        with ThreadPoolExecutor(_READS, thread_name_prefix="records") as pool:
            for step, found in zip(new, pool.map(self._read, new), strict=True):
                if isinstance(found, _Record):
                    known[step] = found
                elif isinstance(found, CorruptError):
                    unreadable.add(step)
        # Records were listed before: one that is set aside meanwhile is seen here or there.
        listed = self.store.list(self.keys.commits)
        set_aside, aside = self._aside(listed)
        return Survey(
            segments={step: record.segments for step, record in known.items()},
            unreadable=frozenset(unreadable),
            set_aside=frozenset(set_aside),
            aside=frozenset(aside),
            verified=frozenset(self._verified(known, set(listed)) if verified else ()),
            pinned=pinned,
            importing=importing,
        )

    def load(self, step: int) -> Manifest:
        """The record of `step`, which the next survey does not read again. Any thread may call it;
        raises as `load_manifest` does."""
        manifest = load_manifest(self.store, self.keys, step)
        self._known[step] = _record(manifest)
        return manifest

    def _read(self, step: int) -> _Record | CorruptError | None:
        """The record of `step`, or what is wrong with it; None where it was deleted meanwhile. The
        manifest itself is let go of: they are many."""
        try:
            record = self._known[step] = _record(load_manifest(self.store, self.keys, step))
        except CorruptError as error:
            return error
        except NotCommittedError:
            return None
        return record

    def forget(self, step: int) -> None:
        """The record of `step` was deleted, or may be another one now, or a later one set aside."""
        self._known.pop(step, None)
        record = self.keys.commit(step)
        for key in [key for key in self._aside_known if key.startswith(record)]:
            del self._aside_known[key]

    def _aside(self, listed: Iterable[str]) -> tuple[set[int], set[str]]:
        """Steps of records set aside that cannot be read, and the segments of those that can."""
        steps, segments = set[int](), set[str]()
        for key in listed:
            step = self.keys.step_of(key)
            if step is None:
                continue
            if not is_foreign(self.keys, key) and not key.endswith(f".json{SET_ASIDE}"):
                continue
            named = self._named(key)
            if named is None:
                steps.add(step)
            else:
                segments |= named
        return steps, segments

    def _named(self, key: str) -> frozenset[str] | None:
        """The segments that a record set aside refers to; None: it cannot be read."""
        if key in self._aside_known:
            return self._aside_known[key]
        named: frozenset[str] | None = None
        try:
            named = frozenset(Manifest.from_bytes(self.store.get(key), key).segments)
        except CorruptError:
            pass
        except MissingError:
            return frozenset()  # deleted meanwhile
        self._aside_known[key] = named
        return named

    def _verified(self, known: Mapping[int, _Record], listed: Container[str]) -> Iterable[int]:
        for step, record in known.items():
            noted = self.keys.verified(step) in listed
            if noted and verified_at(self.store, self.keys, step, record.sha256) is not None:
                yield step


def _record(manifest: Manifest) -> _Record:
    """What is kept of a manifest, which may take 100 MB."""
    return _Record(segments=frozenset(manifest.segments), sha256=manifest.sha256)
