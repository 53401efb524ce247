"""From what the user names to a store with checkpoints in it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpointing import (
    Keys,
    NotCommittedError,
    S3Config,
    Store,
    StoreError,
    StorePlace,
    is_local,
    list_steps,
    newest,
    open_store,
    place_of,
)
from checkpointing.named_directory import named_directory
from checkpointing.stores.s3.config import SETTINGS
from elastic.protocol.events import RunStarted
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import last_events

PATIENCE_S, TRY_S = 15.0, 8.0
"""How long a server is asked for the first listing, for which somebody waits, and the bound on one
try: one that is dead is told of within 30 s."""

_FOLDER = "checkpoints"
"""Where a run directory has its checkpoints, see `elastic.protocol.run_paths.RunPaths`."""


def open_run(name: str) -> Store:
    """The checkpoints of a run. `name`: its directory, whose records may say that they go to a
    store elsewhere, which is looked into first; its checkpoint directory; or a URL. Below the URL
    of a store that is no directory a run has nothing else.

    Raises:
        StoreError: there are none, or the store cannot be opened.
    """
    elsewhere = _recorded_store(name)
    local = [_below(name), name] if is_local(name) else [name]
    places = local if elsewhere is None else [elsewhere, *local]
    for place in places:
        if _hasty(place).list(Keys().commits):
            return open_store(place)
    nor = f", nor in {places[0]}" if places[0] != name else ""
    if elsewhere is not None:
        nor += ", where they go by its records"
    raise StoreError(name, f"there are no checkpoints in it{nor}; name a run's directory or URL")


def open_run_to_fill(name: str) -> Store:
    """The checkpoints of a run that may not have begun: `name` as for `open_run`."""
    if (elsewhere := _recorded_store(name)) is not None:
        return open_store(elsewhere)
    bare = open_store(name)
    is_folder = not is_local(name) or name.rstrip("/").endswith(f"/{_FOLDER}") or name == _FOLDER
    return bare if is_folder or _hasty(name).list(Keys().commits) else open_store(_below(name))


def run_directory_of(name: str) -> Path | None:
    """The directory of a run on this machine's file systems; None for a store elsewhere, or a
    checkpoint directory on its own."""
    if not is_local(name):
        return None
    path = named_directory(name)
    return path.parent if path.name == _FOLDER else path


def _recorded_store(name: str) -> str | StorePlace | None:
    """Where the last start of the run in a directory has its checkpoints, if not there. Says so
    before anybody asks there, as the user has not named it. The endpoint is the environment's,
    where that names one: it is as this machine reaches the store."""
    if not is_local(name):
        return None
    for one in last_events(RunPaths(root=named_directory(name)).events, RunStarted):
        if isinstance(one, RunStarted) and one.store:
            place, told, at = place_of(one.store), one.store_settings, ""
            if isinstance(place, S3Config):
                from checkpointing.stores.s3.client import endpoint_of  # boto3

                known: dict[str, Any] = {n: told[n] for n in SETTINGS if n in told}
                if endpoint_of(place) is not None:
                    known.pop("endpoint_url", None)
                place = replace(place, **known)
                endpoint = endpoint_of(place)
                at = "" if endpoint is None else f" at {endpoint}"
            print(
                f"elastic: by the run's records its checkpoints go to {one.store}{at}",
                file=sys.stderr,
            )
            return place if isinstance(place, S3Config) else one.store
    return None


def find_step(store: Store, step: int | None) -> int:
    """`step`, or the newest one that can be read for None.

    Raises:
        NotCommittedError: there is no such checkpoint; the message says which there are.
    """
    if step is None:
        last = newest(store, Keys())
        if last is None:
            raise NotCommittedError(0, "none of the run's checkpoints can be read")
        return last.step
    steps = list_steps(store, Keys())
    if step not in steps:
        raise NotCommittedError(step, f"the run has {', '.join(map(str, steps)) or 'none'}")
    return step


def _hasty(where: str | StorePlace) -> Store:
    """The store there, where a server that does not answer is given up soon."""
    place = where if isinstance(where, StorePlace) else place_of(where)
    if isinstance(place, S3Config):
        place = replace(place, timeout_s=PATIENCE_S, part_timeout_s=TRY_S)
    return open_store(place)


def _below(name: str) -> str:
    return f"{name.rstrip('/')}/{_FOLDER}"
