"""A store of `benchmarks.detection`: a directory that is slow while a file stands beside it.

`install` makes it a kind of store of its own, as a package of others would.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpointing import StoreKind, StorePlace
from checkpointing.stores.local import LocalStore
from tests.support.plugins import install_plugin

SCHEME = "detection"
NOISE = "noise"
"""The file, in the run's storage; see `_detection_run.py` for what else it means."""
SLOW_S = 5.0
"""Each object of a checkpoint takes so long; they are written at the same time."""


@dataclass(frozen=True)
class Place(StorePlace):
    """A directory, and the file that makes it slow."""

    directory: Path
    slow_while: Path

    def __str__(self) -> str:
        return f"{SCHEME}://{self.directory}"

    def below(self, name: str) -> Place:
        return Place(self.directory / name, self.slow_while)


class SlowStore(LocalStore):
    """See above."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.directory)
        self._slow_while = place.slow_while

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """See Store."""
        if self._slow_while.exists():
            time.sleep(SLOW_S)
        return super().put(key, chunks)


def _place_of(url: str) -> StorePlace:
    directory = Path(url.removeprefix(f"{SCHEME}://"))
    return Place(directory, directory.parent / NOISE)


KIND = StoreKind(at=_place_of, open=SlowStore)


def install(folder: Path) -> None:
    """Makes the kind known to all processes that have `folder` on their path."""
    folder.mkdir()
    source = f"from {__name__} import KIND\n"
    install_plugin(
        folder,
        "detection_store",
        source,
        {"elastictrainer.stores": {SCHEME: "detection_store:KIND"}},
    )
