"""How those who hear that a machine will be taken away pass it on."""

from __future__ import annotations

from collections.abc import Callable

from elastic.protocol.coordinator_api import CoordinatorApi
from elastic.protocol.rpc import Remote

Tell = Callable[[str, float | None, str], None]
"""Called with Ray's id of the node, the deadline (s since the epoch; None: unknown), the reason."""


def tell_coordinator(coordinator: Remote[CoordinatorApi]) -> Tell:
    """A `Tell` for a coordinator actor. It waits through a restart of the coordinator."""

    def tell(node: str, deadline_s: float | None, reason: str) -> None:
        coordinator.call(CoordinatorApi.drain, node, deadline_s, reason)

    return tell
