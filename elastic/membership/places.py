"""Which replicas stand and form, what is left of others, who has a place in them, and who of those
is here. Pure.

`machine.py` asks all this after every arrival. To count anew each time would cost 16,384² looks
in a regroup of 16,384 workers, so the answers are kept up to date, and an event costs what it
changes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from elastic.membership.topology import Spread, find_spread
from elastic.protocol.messages import Identity
from elastic.protocol.roster import Remnant, Replica


class Places:
    """Who has a place in which replica, standing or forming.

    Args:
        here: the workers that wait in `join`: a view that changes as they come and go.
        members: all workers, with their nodes: a view as well.
        tensor: workers in a tensor group.
    """

    def __init__(self, here: Set[str], members: Mapping[str, Identity], tensor: int) -> None:
        self._here, self._members, self._tensor = here, members, tensor
        self.standing: dict[int, Replica] = {}
        """Formation -> replica of the roster that is still whole, in order of position."""
        self.forming: dict[int, Replica] = {}
        """Formation -> replica that forms, the oldest first."""
        self.remnants: dict[int, Remnant] = {}
        """Formation -> what is left of a replica that stood, and lost a worker."""
        self.absent: set[str] = set()
        """Workers of standing replicas and of remnants that do not wait."""
        self.idle: set[str] = set()
        """Workers that wait and have no place: spares, survivors, replacements."""
        self.retired: set[str] = set()
        """Workers that get no place any more."""
        self._straddling: dict[int, Spread] = {}
        """Replicas, standing or forming, that are on more than one node."""
        self._unbuilt: dict[int, set[str]] = {}
        self._of: dict[str, Replica] = {}
        self._survivors: dict[str, int] = {}

    def of(self, worker: str) -> Replica | None:
        """The replica, standing or forming, that `worker` has a place in."""
        return self._of.get(worker)

    def formation_of(self, worker: str) -> int | None:
        """Number of the replica, standing or forming, that `worker` has a place in."""
        replica = self._of.get(worker)
        return None if replica is None else replica.formed

    def stands(self, worker: str) -> bool:
        """Whether `worker` has a slot in a standing replica."""
        replica = self._of.get(worker)
        return replica is not None and replica.formed in self.standing

    @property
    def survivors(self) -> Set[str]:
        """Workers of remnants."""
        return self._survivors.keys()

    @property
    def whole(self) -> int:
        """Replicas that stand or form."""
        return len(self.standing) + len(self.forming)

    @property
    def taken(self) -> set[int]:
        """Indices of all replicas, whole or not: a remnant's is that of its successor, too."""
        whole = {replica.index for replica in (*self.standing.values(), *self.forming.values())}
        return whole | {remnant.index for remnant in self.remnants.values()}

    @property
    def unrepaired(self) -> list[Remnant]:
        """Remnants of which no replica forms."""
        forming = {replica.index for replica in self.forming.values()}
        return [remnant for remnant in self.remnants.values() if remnant.index not in forming]

    @property
    def repairs(self) -> list[Replica]:
        """Replicas that form of remnants, and are not ready."""
        left = {remnant.index for remnant in self.remnants.values()}
        return [r for r in self.forming.values() if r.index in left and self.builds(r.formed)]

    @property
    def draining(self) -> list[Replica]:
        """Standing replicas with a worker that gets no place any more."""
        if not self.retired:
            return []
        replicas = (self._of.get(worker) for worker in self.retired)
        formed = {replica.formed for replica in replicas if replica is not None}
        return [replica for number, replica in self.standing.items() if number in formed]

    @property
    def straddling(self) -> list[Replica]:
        """Standing replicas on more than one node that are not `draining`, the worst first."""
        if not self._straddling:
            return []
        draining = {replica.formed for replica in self.draining}
        found = [f for f in self._straddling if f in self.standing and f not in draining]
        found.sort(key=lambda formed: self._straddling[formed], reverse=True)
        return [self.standing[formed] for formed in found]

    @property
    def unready(self) -> int:
        """Replicas that form and have not all built their part."""
        return len(self._unbuilt)

    def builds(self, formed: int) -> bool:
        """Whether a replica forms and has not all built its part."""
        return formed in self._unbuilt

    @property
    def ready(self) -> list[Replica]:
        """Formed replicas all of whose workers have built their part and wait."""
        return [r for r in self.forming.values() if r.formed not in self._unbuilt]

    def arrive(self, worker: str, built: int) -> None:
        """A worker waits; `built` is the formation whose part it holds."""
        self.absent.discard(worker)
        if worker not in self._of:
            self._leave_idle([worker])
        self.built(worker, built)

    def built(self, worker: str, formed: int) -> None:
        """A worker has its part of a formation."""
        replica = self._of.get(worker)
        if replica is None or replica.formed != formed or formed not in self._unbuilt:
            return
        self._unbuilt[formed].discard(worker)
        if not self._unbuilt[formed]:
            del self._unbuilt[formed]

    def lose(self, worker: str) -> Replica | None:
        """A worker is gone and waits no more. Returns the replica that breaks with it. Of one that
        stood a remnant is left."""
        self.idle.discard(worker)
        self.retired.discard(worker)
        self.forget([worker])
        replica = self._of.get(worker)
        if replica is None:
            return None
        if replica.formed in self.standing:
            others = {
                r: w for r, w in enumerate(replica.workers) if w not in {worker, *self.retired}
            }
            left = Remnant(index=replica.index, formed=replica.formed, workers=others)
            self.set_remnants([*self.remnants.values(), left])
        return self._dissolve(replica)

    def set_remnants(self, remnants: Iterable[Remnant]) -> None:
        """From now on these are all; who is of none any more, and has no other place, is idle."""
        before = self._survivors
        self.remnants = {remnant.formed: remnant for remnant in remnants if remnant.workers}
        self._survivors = {w: r.formed for r in self.remnants.values() for w in r.workers.values()}
        freed = [w for w in before if w not in self._survivors and w not in self._of]
        self.absent.difference_update(freed)
        self._leave_idle([worker for worker in freed if worker in self._here])

    def keep_remnants(self, holders: Container[str]) -> None:
        """Of remnants those go on that are `holders` of the state."""
        self.set_remnants(
            replace(remnant, workers={r: w for r, w in remnant.workers.items() if w in holders})
            for remnant in self.remnants.values()
        )

    def forget(self, workers: Iterable[str]) -> None:
        """Some are of no remnant any more: gone, to go, or in a whole replica."""
        gone = self._survivors.keys() & set(workers)
        if gone:
            self.keep_remnants(self._survivors.keys() - gone)

    def retire(self, worker: str) -> Replica | None:
        """A worker is to get no place any more; it keeps one in a standing replica for now.
        Returns the formation that is given up for it."""
        self.retired.add(worker)
        self.idle.discard(worker)
        self.forget([worker])
        replica = self._of.get(worker)
        if replica is None or replica.formed in self.standing:
            return None
        return self._dissolve(replica)

    def take_apart(self, workers: Iterable[str]) -> None:
        """The replicas that `workers` have a place in stand no more."""
        for worker in workers:
            replica = self._of.get(worker)
            if replica is not None:
                self._dissolve(replica)

    def _dissolve(self, replica: Replica) -> Replica:
        self.standing.pop(replica.formed, None)
        self._unbuilt.pop(replica.formed, None)
        self._straddling.pop(replica.formed, None)
        for other in replica.workers:
            del self._of[other]
        self.absent.difference_update(w for w in replica.workers if w not in self._survivors)
        self._leave_idle([other for other in replica.workers if other in self._here])
        self.forming.pop(replica.formed, None)
        return replica

    def _leave_idle(self, workers: Sequence[str]) -> None:
        free = (w for w in workers if w not in self.retired and w not in self._survivors)
        self.idle.update(free)

    def form(self, replicas: Sequence[Replica]) -> None:
        """Replicas begin to form, from idle workers."""
        for replica in replicas:
            self.forming[replica.formed] = replica
            self._unbuilt[replica.formed] = set(replica.workers)
            spread = find_spread(replica.workers, self._members, self._tensor)
            if spread.nodes > 1:
                self._straddling[replica.formed] = spread
            self._of.update(dict.fromkeys(replica.workers, replica))
            self.idle.difference_update(replica.workers)

    def seat(self, replicas: Sequence[Replica]) -> None:
        """A roster of `replicas` stands, and its workers leave to train, with those of remnants.
        Replicas of the one before that are not in it are given up, and some of those that are may
        have new numbers."""
        formed = {replica.formed for replica in replicas}
        for replica in [r for r in self.standing.values() if r.formed not in formed]:
            self._dissolve(replica)
        self.standing = {replica.formed: replica for replica in replicas}
        for replica in replicas:
            if self._of[replica.workers[0]] is not replica:
                self._of.update(dict.fromkeys(replica.workers, replica))
        for number in self.standing:
            self.forming.pop(number, None)
            self._unbuilt.pop(number, None)
        self.forget(worker for replica in replicas for worker in replica.workers)
        self.absent = {worker for replica in replicas for worker in replica.workers}
        self.absent.update(self._survivors)
