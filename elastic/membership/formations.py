"""Puts workers without a place together into replicas. Pure.

Spares, survivors of broken replicas and replacements wait in the pool. Whenever it holds enough for
a missing replica, or for the successor of one that will leave, one is formed while the others
train. So is one on a single node in the place of one on several (`topology.py`). What is left of a
replica with state comes first: it is made whole (`repairs.py`). Where no replica is left whole, the
survivors may still hold a whole copy between them: then they become one
(`reassembly.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from elastic.membership.decisions import GroupConfig
from elastic.membership.places import Places
from elastic.membership.progress import Progress
from elastic.membership.reassembly import find_copy, plan_reassembly
from elastic.membership.repairs import merge_remnants, plan_repairs
from elastic.membership.topology import holds_together, plan_seats
from elastic.membership.versions import decide_versions, describe_difference
from elastic.protocol.messages import Identity, Report, Versions
from elastic.protocol.roster import Replica, find_room, plan_formations


class Formations:
    """The replicas that form, and those that were given up.

    Args:
        config: sizes.
        progress: when the run went back last.
        places: who has a place; it changes with every formation.
        waiting: the workers that wait in `join`, with their reports: a view.
        members: all workers, with their nodes: a view.
    """

    def __init__(
        self,
        config: GroupConfig,
        progress: Progress,
        places: Places,
        waiting: Mapping[str, Report],
        members: Mapping[str, Identity],
    ) -> None:
        self._config, self._progress = config, progress
        self._places, self._waiting, self._members = places, waiting, members
        self.begun = 0
        """Replicas that ever began to form."""
        self._start_workers = config.start_workers
        self._patient = True
        self._broken: list[Replica] = []
        self._repairs: set[int] = set()
        self._reassembled = False
        self._kept = 0  # number of the replica that goes on with what its workers hold
        self._versions: Versions | None = None  # the run's; None: no replica has formed yet
        self._refused: dict[str, str] = {}

    def resume(
        self, begun: int, broken: Sequence[Replica], *, kept: int, placed: Sequence[str]
    ) -> None:
        """Goes on after those that had `begun` before the coordinator was lost, of which some were
        `broken` then, and `kept` goes on with what its workers hold. `placed` are all that had a
        place in any."""
        self.begun = begun
        self._broken.extend(broken)
        self._kept = kept
        self._repairs.update(self._places.forming)  # some may hold a part of the state
        if placed:
            self._versions = decide_versions(self._members[worker].versions for worker in placed)

    # -- the end of a formation --------------------------------------------------------------------

    def lose(self, worker: str) -> None:
        """A worker is gone, and the replica that it had a place in with it. At the start, others no
        longer wait for it: its replacement may take long to come."""
        self._await_no_longer(worker)
        broken = self._places.lose(worker)
        self._give_up(broken)
        if broken is not None and self._room < 0 and self._places.remnants:  # there is a successor
            *others, _ = self._places.remnants.values()
            self.keep_remnants({w for remnant in others for w in remnant.workers.values()})
        self._reassembled = False
        self._refused.pop(worker, None)

    def retire(self, worker: str) -> None:
        """A worker is to get no place any more. At the start, others no longer wait for it."""
        self._await_no_longer(worker)
        self._refused.pop(worker, None)
        self._give_up(self._places.retire(worker))

    def comes(self, worker: str, built: int) -> None:
        """A worker joins, and has `built` its part of that formation. One that was told to build
        another, and has not, never got that answer: the formation is given up, for its peers there
        wait for this one."""
        places = self._places
        self._compare(worker)
        replica = places.of(worker)
        if replica is None or replica.formed == built or worker in places.survivors:
            return  # survivors build beside the steps, and may join before they are done
        if places.builds(replica.formed):
            self.tear(worker)

    def tear(self, worker: str) -> None:
        """The replica of a worker is given up: it never got the answer that the others have."""
        replica = self._places.of(worker)
        self._places.take_apart([worker])
        self._give_up(replica)

    def _await_no_longer(self, worker: str) -> None:
        if worker not in self._places.retired:
            self._start_workers -= 1

    def _give_up(self, formation: Replica | None) -> None:
        if formation is not None:
            self._broken.append(formation)
            self._reassembled = False

    @property
    def present(self) -> set[int]:
        """Numbers of the formations that are still there."""
        return {*self._places.standing, *self._places.forming}

    def take_broken(self) -> list[Replica]:
        """Replicas that have broken, or will not come about, and that nobody has been told of."""
        broken, self._broken = self._broken, []
        return broken

    # -- versions ----------------------------------------------------------------------------------

    def take_refused(self) -> dict[str, str]:
        """Workers that get no place for their versions, and why, that nobody has been told of."""
        refused, self._refused = self._refused, {}
        return refused

    def _compare(self, worker: str) -> None:
        """A worker of other versions than the run's gets no place. It waits, so that Ray starts no
        other there."""
        versions = self._members[worker].versions
        if self._versions in (None, versions) or worker in self._places.retired:
            return
        self.retire(worker)
        self._refused[worker] = describe_difference(versions, self._versions)

    def _settle_versions(self) -> None:
        """No replica has formed: the run's versions are those of most who wait for a place."""
        idle = [worker for worker in self._waiting if worker in self._places.idle]
        self._versions = decide_versions(self._members[worker].versions for worker in idle)
        for worker in idle:
            self._compare(worker)

    # -- new ones ----------------------------------------------------------------------------------

    def expect(self, workers: int) -> None:
        """At the start only so many workers are waited for, where there were to be more."""
        self._start_workers = min(self._start_workers, workers)

    def wait_no_longer(self) -> None:
        """The first replicas begin with the workers that are here, if there are `min_replicas` of
        them; those that come later become more."""
        self.expect(self._config.min_replicas * self._config.workers_per_replica)
        self._patient = False

    @property
    def awaits_start(self) -> bool:
        """Whether the first replicas wait for workers that should be on their way. Those that will
        get no place are none of them."""
        return self.begun == 0 and self._patient and len(self._places.idle) < self._start_workers

    def from_pool(self) -> tuple[Replica, ...]:
        """Forms the replicas that there is room and workers for."""
        if not self._enough_wait:
            return ()
        if self._versions is None:
            self._settle_versions()
        if self._room <= 0:
            return self._succeed_a_straddling_one()
        return self._form(self._choose_from_pool())

    @property
    def _enough_wait(self) -> bool:
        """Whether there may be workers for a replica, and at the start for the smallest layout,
        where not all have the same versions."""
        size, idle = self._config.workers_per_replica, len(self._places.idle)
        least = self._start_workers if self.begun == 0 else 1
        if idle < max(least, size):
            return False
        needed = (self._config.min_replicas if self.begun == 0 else 1) * size
        usable = self.usable
        return usable == idle or usable >= needed

    @property
    def usable(self) -> int:
        """Idle workers that one layout can be made of: before the run has versions, those that most
        have."""
        idle = self._places.idle
        if self._versions is not None:
            return len(idle)
        return max(Counter(self._members[worker].versions for worker in idle).values(), default=0)

    @property
    def _spare(self) -> set[str]:
        """Idle workers that no repair needs."""
        size, places = self._config.workers_per_replica, self._places
        lacking = sum(size - len(remnant.workers) for remnant in places.unrepaired)
        return set(self._pool[lacking:]) if lacking else places.idle

    def _choose_from_pool(self) -> list[str]:
        """Tensor groups, and what makes one level of two-level collectives, are not split over
        nodes: where a node holds one at all, workers rather wait for their like. But the run does
        not wait for that below `min_replicas`. Nor for those that share samples otherwise, which
        stay on a node where there are whole ones enough."""
        config, places, dims = self._config, self._places, self._config.dims
        pool, together = self._spare, dims.together
        seats: list[tuple[str, ...]] = []
        for whole in dict.fromkeys((max(together, dims.unit), together)):
            more = self._room - len(seats)
            seats += self._plan_seats(pool.difference(*seats), whole, more)
        chosen = [worker for seat in seats for worker in seat]
        left = pool.difference(chosen)
        if together > 1 and len(left) >= config.workers_per_replica:
            most = self._room - len(seats)
            if holds_together(self._members.values(), together):
                most = min(most, config.min_replicas - places.whole - len(seats))
            for seat in self._plan_seats(left, 1, most):
                chosen.extend(seat)
        return chosen

    def _succeed_a_straddling_one(self) -> tuple[Replica, ...]:
        """Forms a replica on one node, where there are the workers, in the place of one on several:
        that leaves when this has the state (`plan_departures`)."""
        straddling = self._places.straddling
        if straddling:
            for seat in self._plan_seats(self._spare, self._config.workers_per_replica, 1):
                return self._form(seat, moving=len(straddling))
        return ()

    def _plan_seats(self, pool: Iterable[str], together: int, most: int) -> list[tuple[str, ...]]:
        free = [self._waiting[worker].identity for worker in pool]
        dims = self._config.dims
        seats = plan_seats(free, size=dims.workers, together=together, most=most)
        return [dims.by_rank(seat) for seat in seats]

    @property
    def _pool(self) -> list[str]:
        """Idle workers, neighbours on the network next to each other."""
        ranks = {worker: self._waiting[worker].identity.rank for worker in self._places.idle}
        return sorted(ranks, key=lambda worker: (ranks[worker], worker))

    @property
    def mendable(self) -> bool:
        """Whether what is left of some replica can be made whole."""
        there = sum(len(remnant.workers) for remnant in self._places.unrepaired)
        size = self._config.workers_per_replica
        return there > 0 and there + len(self._places.idle) >= size

    def repair(self) -> tuple[Replica, ...]:
        """Has what is left of replicas made whole, as far as there are workers for it. Called where
        all of them wait."""
        places, dims = self._places, self._config.dims
        unrepaired = places.unrepaired
        if not unrepaired:
            return ()
        left, _ = merge_remnants(unrepaired, len(places.idle), self._members, dims)
        others = [each for each in places.remnants.values() if each not in unrepaired]
        places.set_remnants([*others, *left])
        repaired = self._begin(plan_repairs(left, self._pool, self._members, dims, self.begun + 1))
        self._repairs.intersection_update(places.forming)
        self._repairs.update(replica.formed for replica in repaired)
        return repaired

    def repair_here(self) -> tuple[Replica, ...]:
        """As `repair`, with nobody at work whom the survivors could follow meanwhile."""
        repaired = self.repair()
        self._places.forget(worker for replica in repaired for worker in replica.workers)
        return repaired

    def keep_remnants(self, holders: Set[str], *, entering: Set[str] = frozenset()) -> None:
        """Of what is left of replicas those go on that are `holders` of the state. A replica that
        forms of others is given up.

        Args:
            holders: workers.
            entering: workers of replicas that enter the roster, and are of remnants no longer.
        """
        places = self._places
        for worker in [w for w in places.survivors if w not in holders and w not in entering]:
            replica = places.of(worker)
            if replica is not None:
                places.take_apart([worker])
                self._give_up(replica)
        places.keep_remnants(holders - entering)

    @property
    def reassembled(self) -> bool:
        """Whether it is decided whether the survivors become a replica."""
        return self._reassembled or self._kept in self._places.forming

    def from_survivors(self, members: Iterable[str]) -> tuple[Replica, ...] | None:
        """One replica that goes on with what its workers hold, where none that stands has state.
        Replicas that stand may have been getting theirs, and some of their workers have it.

        Args:
            members: all living workers.

        Returns:
            It, if there is one; None while that is not decided, for it waits for all who are on
            their way here from a replica that is no more.
        """
        places = self._places
        self._give_up_repairs()
        if places.absent or any(w not in self._waiting and not places.of(w) for w in members):
            return None
        self._reassembled = True
        places.set_remnants([])
        if self._state_stands():
            return ()
        candidates = places.idle.union(*(r.workers for r in places.standing.values()))
        leaving = places.retired & self._waiting.keys()  # they are still there
        chosen = self._choose(candidates) or self._choose(candidates | leaving)
        places.take_apart(chosen)
        if chosen:
            self._make_room()
        formed = self._form(chosen)
        self._kept = formed[0].formed if formed else 0
        return formed

    def _give_up_repairs(self) -> None:
        """Who has built for one of them holds the state of its rank."""
        for replica in [*self._places.forming.values()]:
            if replica.formed in self._repairs:
                self._places.take_apart(replica.workers)
                self._give_up(replica)

    def _choose(self, candidates: Iterable[str]) -> list[str]:
        reports = [self._waiting[worker] for worker in sorted(candidates)]
        size = self._config.workers_per_replica
        return plan_reassembly(reports, size, since=self._progress.since)

    @property
    def keeping(self) -> bool:
        """Whether a replica that goes on with what its workers hold is still being built."""
        return self._places.builds(self._kept)

    def _state_stands(self) -> bool:
        """Whether a replica stands all of whose workers have the state, as they say."""
        workers = self._config.workers_per_replica
        holders = find_copy(self._waiting.values(), workers, since=self._progress.since)
        names = {report.identity.worker for report in holders}
        return any(names.issuperset(r.workers) for r in self._places.standing.values())

    @property
    def _room(self) -> int:
        """How many more replicas may form."""
        places, most = self._places, self._config.max_replicas
        draining = len(places.draining)
        return find_room(replicas=len(places.taken), draining=draining, max_replicas=most)

    def _make_room(self) -> None:
        """Successors of replicas that broke may have taken all there is: the youngest goes, as none
        that is left has state. Its workers are free for another one."""
        places = self._places
        while self._room <= 0:
            draining = places.draining
            others = [*places.standing.values(), *places.forming.values()]
            youngest = max(others, key=lambda r: (r not in draining, r.formed))
            if youngest.formed in places.forming:
                self._broken.append(youngest)
            places.take_apart(youngest.workers)

    def _form(self, pool: Sequence[str], *, moving: int = 0) -> tuple[Replica, ...]:
        """Forms replicas of `pool`, one after the other. Beside those that will leave, `moving`
        others may have a successor."""
        places = self._places
        replicas = plan_formations(
            pool=pool,
            taken=places.taken,
            draining=len(places.draining) + moving,
            max_replicas=self._config.max_replicas,
            workers_per_replica=self._config.workers_per_replica,
            next_number=self.begun + 1,
        )
        return self._begin(replicas)

    def _begin(self, replicas: Sequence[Replica]) -> tuple[Replica, ...]:
        self.begun += len(replicas)
        self._places.form(replicas)
        return tuple(replicas)
