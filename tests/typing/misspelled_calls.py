"""Calls to actors that must not pass mypy; nobody runs them.

`make check` fails where one does: strict mypy reports an ignored error that is none.
"""

from __future__ import annotations

from elastic.coordinator.actor import Coordinator
from elastic.node.snapshot_holder import SnapshotHolder
from elastic.node.uploader import Uploader
from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote
from elastic.protocol.saves import HolderApi, UploaderApi


def misspelled(coordinator: Remote[CoordinatorApi], uploader: Remote[UploaderApi]) -> None:
    """Names of methods that the actors do not have."""
    coordinator.call(CoordinatorApi.drian, "node", None, "why")  # type: ignore[attr-defined]
    coordinator.send(CoordinatorApi.hallo)  # type: ignore[attr-defined,call-overload]
    uploader.send(UploaderApi.wirte)  # type: ignore[attr-defined,call-overload]


def wrong_arguments(coordinator: Remote[CoordinatorApi], holder: Remote[HolderApi]) -> None:
    """Too few, of another type, unknown by name."""
    coordinator.call(CoordinatorApi.drain, "node")  # type: ignore[call-arg]
    coordinator.call(CoordinatorApi.saved, "7")  # type: ignore[arg-type]
    coordinator.call(CoordinatorApi.fail, error="why", step=1)  # type: ignore[call-arg]
    holder.send(HolderApi.read, "key", 0)  # type: ignore[call-overload]


def wrong_answer(coordinator: Remote[CoordinatorApi]) -> str:
    """What a call returns is known."""
    return coordinator.call(CoordinatorApi.saved, 7)  # type: ignore[return-value]


def wrong_actor(uploader: Remote[Uploader], holder: Remote[SnapshotHolder]) -> None:
    """A method of another actor's."""
    uploader.send(SnapshotHolder.settle)  # type: ignore[call-overload]
    holder.send(UploaderApi.write)  # type: ignore[call-overload]


def right(coordinator: Remote[Coordinator], holder: Remote[SnapshotHolder]) -> bool:
    """An actor's handle is one of what it implements."""
    api: Remote[CoordinatorApi] = coordinator
    reader: Remote[HolderApi] = holder
    reader.send(HolderApi.read, "key", 0, 1)
    return api.call(CoordinatorApi.saved, 7)
