"""The kinds of stores, by the scheme of their URLs.

Built in are S3 and directories. Others are entry points of the group `elastictrainer.stores`, each
named after its scheme and a `StoreKind`: so every process of a run finds them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from checkpointing.errors import StoreError
from checkpointing.named_directory import named_directory
from checkpointing.stores.local import LocalStore
from checkpointing.stores.protocols import Store, StorePlace
from checkpointing.stores.s3.config import S3Config

PLUGINS = "elastictrainer.stores"


@dataclass(frozen=True, kw_only=True)
class StoreKind:
    """A kind of store."""

    at: Callable[[str], StorePlace]
    """Makes the place of a URL, and raises StoreError or CheckpointConfigError for one that cannot
    work. It makes no connection."""
    open: Callable[[Any], Store]
    """Opens the store at such a place, which need not exist yet."""


@dataclass(frozen=True)
class LocalPlace(StorePlace):
    """A directory that all nodes see."""

    path: Path
    """It, from the root."""

    def __str__(self) -> str:
        return str(self.path)

    def below(self, name: str) -> LocalPlace:
        """See StorePlace."""
        return LocalPlace(self.path / name)


def place_of(where: str | os.PathLike[str]) -> StorePlace:
    """The place that an `s3://` or `file://` URL, one of an installed kind, or a plain path names.

    Raises:
        StoreError: another scheme, or a `file://` URL of another host.
        CheckpointConfigError: an `s3://` URL without a proper bucket.
    """
    text = os.fspath(where)
    return _kind_of(text).at(text)


def open_store(where: str | os.PathLike[str] | StorePlace) -> Store:
    """The store at a place, which need not exist yet.

    Args:
        where: the place; a `StorePlace`, such as `S3Config`, where a URL does not say enough.

    Raises:
        StoreError, CheckpointConfigError: see `place_of`.
    """
    place = where if isinstance(where, StorePlace) else place_of(where)
    return _kind_of(str(place)).open(place)


def is_local(where: str) -> bool:
    """Whether a place is a directory, rather than objects that others keep."""
    return _scheme(where) in ("", "file")


def _scheme(text: str) -> str:
    scheme, mark, _ = text.partition("://")
    return scheme if mark else ""


def _kind_of(text: str) -> StoreKind:
    scheme = _scheme(text)
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme]
    installed = entry_points(group=PLUGINS)
    if scheme not in installed.names:
        others = "".join(f", {name}://" for name in sorted(installed.names))
        shown = f"{scheme}://..." if "@" in text else text  # somebody may have put a password in
        raise StoreError(
            shown, f"not a store: write s3://BUCKET/PREFIX, file:///DIR{others} or a plain path"
        )
    kind: StoreKind = installed[scheme].load()
    return kind


def _local_place(text: str) -> LocalPlace:
    if not _scheme(text):
        return LocalPlace(named_directory(text))
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StoreError(text, "not a directory of this machine: write file:///DIR")
    return LocalPlace(named_directory(unquote(parts.path)))


def _open_s3(config: S3Config) -> Store:
    from checkpointing.stores.s3.store import S3Store  # boto3 takes a third of a second to import

    return S3Store(config)


_LOCAL = StoreKind(at=_local_place, open=lambda place: LocalStore(place.path))
_BUILT_IN = {
    "": _LOCAL,
    "file": _LOCAL,
    "s3": StoreKind(at=lambda url: S3Config(url=url), open=_open_s3),
}
