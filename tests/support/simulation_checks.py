"""What must hold in every simulated run, whatever dies whenever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from elastic.membership.conclusion import find_states
from elastic.membership.decisions import Effects, Regrouped
from elastic.protocol.messages import Build, Report, Run, Stop
from elastic.protocol.roster import Roster, most_replicas

if TYPE_CHECKING:
    from tests.support.simulated_run import World
    from tests.support.simulated_worker import Applied, SimWorker


def check_effects(
    world: World, effects: Effects, reports: Mapping[str, Report], before: int
) -> None:
    """After each decision. `reports` waited before it; `before` was the generation then."""
    membership = world.membership
    runs = {name: a for name, a in effects.answers.items() if isinstance(a, Run)}
    assert set(effects.answers) <= set(reports)
    if membership.stopped is not None:
        assert set(effects.answers) == set(reports), "somebody is left waiting"
        return
    forming = [
        worker for replica in membership.places.forming.values() for worker in replica.workers
    ]
    standing = {w for replica in membership.places.standing.values() for w in replica.workers}
    assert not set(forming) & standing, "a worker is forming and standing"
    placed = list(forming)
    if effects.regrouped is None:
        assert membership.progress.generation == before and not runs
    else:
        assert membership.progress.generation == before + 1
        placed += membership.roster.workers
        check_roster(world, effects.regrouped, runs, reports)
    assert len(placed) == len(set(placed)), "a worker in two replicas"
    assert set(placed) <= membership.members.keys(), "a slot without a live worker"
    check_nothing_dropped(world, effects, reports)
    check_seats(world, effects)


def check_seats(world: World, effects: Effects) -> None:
    """A new replica is on one node where one has room for it, and splits no tensor group where a
    node holds one, unless the run is short of replicas. What keeps its survivors is not chosen."""
    membership, tensor = world.membership, world.config.dims.tensor
    keep = {n for n, a in effects.answers.items() if isinstance(a, Build) and a.keep}
    repairs = membership.places.repairs
    new = [r for r in effects.formed if keep.isdisjoint(r.workers) and r not in repairs]
    whole = [*membership.places.standing, *membership.places.forming]
    split = [r.formed for r in new if world.split_groups(r.workers)]
    if split and world.most_on_a_node(membership.members) >= tensor:
        there = [
            formed for formed in whole if formed <= max(split)
        ]  # what was repaired since apart
        assert len(there) <= world.plan.min_replicas, "a needless split"
    if effects.regrouped is None and any(len(world.nodes_of(r.workers)) > 1 for r in new):
        size, places = world.plan.workers_per_replica, membership.places
        kept_back = sum(size - len(remnant.workers) for remnant in places.unrepaired)
        room = world.most_on_a_node(places.idle) - kept_back
        assert room < size, "a node had room for a replica"


def check_roster(
    world: World, regrouped: Regrouped, runs: Mapping[str, Run], reports: Mapping[str, Report]
) -> None:
    """At each regroup: slots, lanes, and where everybody goes on."""
    roster, step = regrouped.roster, regrouped.step
    indices = [replica.index for replica in roster.replicas]
    assert len(indices) == len(set(indices)) >= world.plan.min_replicas
    check_numbers(world, roster)
    assert not world.broken & {replica.formed for replica in roster.replicas}
    assert set(runs) == {*roster.workers, *roster.followers}
    for position, replica in enumerate(roster.replicas):
        assert len(replica.workers) == world.plan.workers_per_replica
        places = [(runs[worker].position, runs[worker].rank) for worker in replica.workers]
        assert places == [(position, rank) for rank in range(len(replica.workers))]
    dealt = [lane for index in indices for lane in roster.lanes[index]]
    assert sorted(dealt) == list(range(world.plan.lanes))
    assert sum(run.lead for run in runs.values()) == 1
    at_work, since = [reports[worker] for worker in runs], world.went_back_in
    steps: dict[str, int | None] = dict.fromkeys(runs)
    known: list[int] = []
    for _, found in find_states(at_work, since=since):
        holders = {report.identity.worker: report.step or 0 for report in found}
        if any(holders.keys() >= set(replica.workers) for replica in roster.replicas):
            steps.update(holders)
            known = list(holders.values())
            break
    if max(known, default=0) + 1 < world.recorded:  # of those who left, and all others are lost
        known = []
    snapshot = 0 if world.snapshot is None else world.snapshot[0]
    newest = max(snapshot, *world.saved)
    witnesses = [r for r in reports.values() if r.step == step and r.last and r.generation >= since]
    if known and regrouped.outcome == "finish_step" and witnesses:  # one that leaves, perhaps
        known.append(step)
    assert step == (max(known) if known else newest), "a committed step is repeated"
    in_memory = not known and newest > max(world.saved)
    assert {run.source for run in runs.values()} == {"memory" if in_memory else "store"}
    # One ahead: its only witness told of the step, and died.
    assert world.membership.progress.recorded <= step + 1, "steps recorded that are not done"
    assert (regrouped.outcome in ("start", "restore")) == (not known)
    if regrouped.outcome == "restore":
        check_restore(world, reports)
    for worker, run in runs.items():
        source = run.source_of(run.position)
        assert run.lacks_state == (not run.restore and steps[worker] is None)
        assert source is not None or not run.lacks_state
        assert source is None or run.source_of(source) is None, "a source without state"
        assert source is None or not run.lanes[run.position], "lanes without state"
        assert not run.follows or (worker in roster.followers and not run.restore)
    world.repairs += sum(0 < len(h.ranks) < world.plan.workers_per_replica for h in run.heals)


def check_numbers(world: World, roster: Roster) -> None:
    """No more replicas than `max_replicas` but for those that will leave, whose successors have
    numbers beyond: on machines that go, or on several nodes."""
    most = world.plan.max_replicas
    indices = {replica.index for replica in roster.replicas}
    draining = [r for r in roster.replicas if not world.drained.isdisjoint(r.workers)]
    straddling = [
        r for r in roster.replicas if r not in draining and len(world.nodes_of(r.workers)) > 1
    ]
    assert len(indices) <= most + len(draining) + len(straddling)
    assert max(indices) < most_replicas(most)
    forming = {replica.index for replica in world.membership.places.forming.values()}
    left = {remnant.index for remnant in roster.remnants}
    assert max(indices) < most or set(range(most)) <= indices | forming | left, "a number is free"


def check_restore(world: World, reports: Mapping[str, Report]) -> None:
    """Nobody goes back to a saved state while those who wait hold a whole copy (I6), or would, had
    nobody been let go too early."""
    there = {**world.let_go, **reports}
    assert not hold_a_copy(world, there.keys(), there), "a needless restore"


def check_nothing_dropped(world: World, effects: Effects, reports: Mapping[str, Report]) -> None:
    """Nobody has to drop its part of the last whole copy for a place in a new replica (I6)."""
    membership = world.membership
    sure = {
        replica.formed for replica in membership.places.standing.values()
    } - membership.heals.behind
    if membership.call != "fault" or sure or membership.formations.keeping:
        return
    drop = {n for n, a in effects.answers.items() if isinstance(a, Build) and not a.keep}
    if drop and hold_a_copy(world, reports.keys() - world.drained, reports):
        assert hold_a_copy(world, reports.keys() - drop, reports), "the last copy is dropped"


def hold_a_copy(world: World, names: Set[str], reports: Mapping[str, Report]) -> bool:
    """Whether those of `names` who live and wait, or were let go, hold a whole copy between them,
    by what they have really applied and by the gradient that each holds."""
    ranks: dict[Applied, set[int]] = defaultdict(set)
    committed: set[Applied] = set()
    for name in names - (world.lost - world.let_go.keys()):
        worker = world.workers[name]
        if worker.progress is None or reports[name].generation < world.went_back_in:
            continue
        applied, gradient = worker.progress.applied, worker.gradient
        committed.add(applied)
        ranks[applied].add(worker.place)
        if gradient == (len(applied), reports[name].generation):
            ranks[(*applied, gradient)].add(worker.place)
    return any(
        len(ranks[applied]) == world.plan.workers_per_replica
        for applied in committed
        if len(applied) + 1 >= world.recorded
    )


def check_build(world: World, worker: SimWorker, answer: Build) -> None:
    """Nobody who works in a whole replica is made to build again, and a state is kept in its
    place."""
    channel = worker.replica
    if answer.keep:
        assert worker.progress is not None and worker.place == answer.rank
    apart = worker.name in world.taken_apart
    if channel is not None:
        world.taken_apart.discard(worker.name)
    assert (
        channel is None
        or apart
        or channel.given_up
        or any(
            name in world.lost | world.dead | channel.closed | world.drained
            for name in channel.members
        )
    ), f"{worker.name} must build again without need"


def check_run(worker: SimWorker, run: Run) -> None:
    """Each committed step is applied once: nobody skips one, nobody goes back but for a restore."""
    progress, heals = worker.progress, run.lacks_state
    if run.restore:
        assert not heals
        return
    assert heals or progress is not None
    if progress is not None and not heals:
        assert progress.step in (run.step, run.step - 1)
        assert progress.step == run.step or run.commit is not None
        assert run.rank == worker.place, "with the state of another rank"


def check_trouble(world: World, worker: SimWorker) -> None:
    """A worker whose replica did not break would be taken for the culprit and sent home."""
    assert worker.replica is not None
    broken = world.membership.replica_broken(worker.name)
    assert broken or any(name in world.dead for name in worker.replica.members), (
        f"{worker.name} is blamed for an error in {worker.wait.what}"
    )


def check_end(world: World) -> None:
    """Nobody can move any more: the run must be over, complete, and known to all."""
    alive = [worker for name, worker in world.workers.items() if name not in world.dead]
    stuck = {worker.name: worker.wait.what for worker in alive if not worker.done}
    assert not stuck, f"a deadlock: {stuck}, call {world.membership.call}"
    assert world.membership.stopped == Stop(error=None)
    assert world.plan.steps in world.saved
    assert world.membership.progress.recorded == world.plan.steps
    assert set(world.log) == set(range(world.plan.steps)), "steps unrecorded"
    standing = world.membership.places.standing.values()
    holders = [world.workers[name] for replica in standing for name in replica.workers]
    states = {w.progress.applied for w in holders if w.progress is not None}
    assert len(states) <= 1, "replicas differ"
    for applied in (*states, world.saved[world.plan.steps]):
        assert [step for step, _ in applied] == list(range(world.plan.steps))
