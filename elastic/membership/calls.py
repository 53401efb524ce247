"""The calls to workers that are at work: their numbers, and who has followed them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.protocol.messages import Signal, SignalKind, Standing


class Calls:
    """Every worker's signals are numbered on their own; an answer to `join` settles
    those before it."""

    def __init__(self) -> None:
        self._serials: dict[str, int] = {}
        self.unfollowed: dict[str, int] = {}
        """Workers that were signalled and have not joined since, with the first such signal."""

    def resume(self, standings: Sequence[Standing]) -> None:
        """Goes on with the numbers that the workers have heard."""
        self._serials = {standing.identity.worker: standing.serial for standing in standings}

    def sign(self, worker: str, kind: SignalKind, *, broken: bool) -> Signal:
        """The next signal to `worker`, which counts as called from now on."""
        serial = self._serials[worker] = self._serials.get(worker, 0) + 1
        self.unfollowed.setdefault(worker, serial)
        return Signal(serial=serial, kind=kind, broken=broken)

    def followed(self, worker: str) -> None:
        """A worker has joined."""
        self.unfollowed.pop(worker, None)

    def forget(self, worker: str) -> None:
        """A worker was lost: it is called no more, and nobody waits for it."""
        self.unfollowed.pop(worker, None)
        self._serials.pop(worker, None)

    def settled(self, worker: str) -> int:
        """The signal up to which an answer settles all."""
        return self._serials.get(worker, 0)

    def laggards(self, signals: Mapping[str, Signal]) -> list[str]:
        """Those who have followed neither the signal that they were sent nor a later one. Who has
        joined in between has followed, though it may be called again by now."""
        return sorted(
            worker
            for worker, signal in signals.items()
            if self.unfollowed.get(worker, signal.serial + 1) <= signal.serial
        )
