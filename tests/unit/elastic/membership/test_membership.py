from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from elastic.membership.calls import Calls
from elastic.membership.decisions import Effects, GroupConfig
from elastic.membership.failure import FIRST_PAUSE_S
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol.messages import (
    Build,
    Identity,
    Leave,
    Report,
    Run,
    Signal,
    Standing,
    Stop,
    Versions,
)
from elastic.protocol.roster import Replica
from tests.support.simulated_run import Plan, World, play
from tests.support.simulated_worker import make_commit as commit
from trainer.parallel.layout import ParallelDims

STEPS, IN_VAIN = 100, 3
OURS: Versions = (("python", "3.12"), ("torch", "2.13.0"))
OTHERS: Versions = (("python", "3.12"), ("torch", "2.11.0"))


def standing(worker: str, formed: int, *, generation: int = 3, **more: Any) -> Standing:
    """Of a worker of a roster of one replica."""
    identity = Identity(worker=worker, rank=int(worker[1:]), node="n", pid=1, versions=OURS)
    return Standing(
        identity=identity, formed=formed, generation=generation, replicas=1, lanes=(0,), **more
    )


class Group:
    """A membership, and the reports of its workers: `a0` is worker `a` with world rank 0."""

    def __init__(
        self,
        *,
        replicas: int,
        each: int = 1,
        least: int = 1,
        start: int | None = None,
        lanes: int | None = None,
        generation: int = 0,
        restore_step: int = 0,
        snapshot_step: int = 0,
        dims: ParallelDims | None = None,
    ) -> None:
        dims = dims or ParallelDims(tensor=each)
        config = GroupConfig(
            max_replicas=replicas,
            min_replicas=least,
            dims=dims,
            lanes=lanes or replicas,
            steps=STEPS,
            start_workers=replicas * dims.workers if start is None else start,
            max_regroups_without_progress=IN_VAIN,
        )
        self.membership = Membership(
            config,
            Progress(generation=generation, restore_step=restore_step, snapshot_step=snapshot_step),
        )
        self.nodes: dict[str, str] = {}
        """Worker -> its node; "n" where it is not in here."""
        self.versions: dict[str, Versions] = {}
        """Worker -> its versions; `OURS` where it is not in here."""
        self.built: dict[str, int] = {}
        self.generations: dict[str, int] = {}

    def join(self, worker: str, step: int | None = None, **more: Any) -> Effects:
        """A worker joins with what it built last, from the roster that it was in last."""
        node = self.nodes.get(worker, "n")
        identity = Identity(
            worker=worker,
            rank=int(worker[1:]),
            node=node,
            pid=1,
            versions=self.versions.get(worker, OURS),
        )
        built = more.pop("built", self.built.get(worker, 0))
        generation = more.pop("generation", self.generations.get(worker, 0))
        report = Report(identity=identity, built=built, step=step, generation=generation, **more)
        self.membership.join(report)
        return self.advance()

    def resume(self, *standings: Standing, restored: int = 1, recorded: int = 5) -> None:
        """A coordinator started anew takes up what the workers of generation 3 know."""
        formations = max(standing.formed for standing in standings)
        self.membership.resume(
            standings,
            generation=3,
            restored=restored,
            formations=formations,
            recorded=recorded,
            began=recorded,
        )

    def lose(self, worker: str) -> Effects:
        self.membership.lose(worker)
        return self.advance()

    def checkpointed(self, step: int) -> Effects:
        self.membership.progress.checkpointed(step)
        return self.advance()

    def build(self, *workers: str) -> Effects:
        """They have built what they were told to, and join again."""
        for worker in workers:
            effects = self.join(worker)
        return effects

    def start(self, *workers: str) -> Effects:
        """Brings the workers to their first roster; those too many become spares."""
        for worker in workers:
            self.join(worker)
        return self.build(*self.built)

    def advance(self) -> Effects:
        effects = self.membership.advance()
        for worker, answer in effects.answers.items():
            if isinstance(answer, Build):
                self.built[worker] = answer.formed
            if isinstance(answer, Run):
                self.generations[worker] = answer.generation
        return effects


def layout(effects: Effects) -> dict[int, tuple[str, ...]]:
    """Replica index -> workers, in order of position."""
    assert effects.regrouped is not None
    return {replica.index: replica.workers for replica in effects.regrouped.roster.replicas}


def run_of(effects: Effects, worker: str) -> Run:
    answer = effects.answers[worker]
    assert isinstance(answer, Run)
    return answer


def pairs(run: Run) -> dict[int, int]:
    """Position that heals -> position that it heals from."""
    return {heal.position: heal.source for heal in run.heals}


def kept(effects: Effects) -> dict[str, bool]:
    """Worker that is to build -> whether it goes on with what it holds."""
    return {w: answer.keep for w, answer in effects.answers.items() if isinstance(answer, Build)}


def signals(effects: Effects) -> dict[str, str]:
    return {worker: signal.kind for worker, signal in effects.signals.items()}


# -- versions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ["a0", "b1", "c2"])
def test_a_worker_of_other_versions_than_most_gets_no_place(odd: str) -> None:
    """Also where it came first. The start does not wait for one in its place."""
    group = Group(replicas=3)
    group.versions[odd] = OTHERS
    workers = ["a0", "b1", "c2"]
    effects = [group.join(worker) for worker in workers][-1]
    (detail,) = (effects.refused.pop(worker) for worker in [odd])
    assert not effects.refused
    assert "torch 2.11.0 where the run has 2.13.0: " in detail and "python" not in detail
    workers.remove(odd)
    assert [replica.workers for replica in effects.formed] == [(worker,) for worker in workers]
    effects = group.build(*workers)
    assert layout(effects) == {0: (workers[0],), 1: (workers[1],)} and odd not in effects.answers
    assert not group.advance().refused, "once"


def test_of_equally_many_those_who_came_first_are_the_run() -> None:
    group = Group(replicas=2)
    group.versions["b0"] = OTHERS
    group.join("b0")
    effects = group.join("a1")
    assert list(effects.refused) == ["a1"]
    assert [replica.workers for replica in effects.formed] == [("b0",)]


def test_a_replacement_of_other_versions_gets_no_place() -> None:
    """As on a node whose image was changed; those at work there stay. One of the run's gets it."""
    group = Group(replicas=2)
    group.start("a0", "b1")
    group.lose("b1")
    group.join("a0", step=5)
    group.versions["c2"] = OTHERS
    effects = group.join("c2")
    assert list(effects.refused) == ["c2"] and not effects.formed
    assert "c2" not in group.membership.places.idle and not group.membership.needs("c2")
    assert [replica.workers for replica in group.join("d3").formed] == [("d3",)]


def test_one_that_does_not_say_its_versions_is_refused() -> None:
    """Its package is of before they were told."""
    group = Group(replicas=2)
    group.start("a0", "b1")
    group.versions["c2"] = ()
    (detail,) = group.join("c2").refused.values()
    assert "torch unknown where the run has 2.13.0" in detail


def test_the_run_keeps_its_versions_where_all_who_had_them_are_lost() -> None:
    """At once, say, and all are soon back: it is not handed to the one machine that waits."""
    group = Group(replicas=2, least=2, restore_step=4)
    group.start("a0", "b1")
    group.versions["c2"] = OTHERS
    assert list(group.join("c2").refused) == ["c2"]
    group.lose("a0")
    effects = group.lose("b1")
    assert (effects.formed, effects.short_of) == ([], 2)
    formed = [*group.join("d3").formed, *group.join("e4").formed]
    assert [replica.workers for replica in formed] == [("d3",), ("e4",)]


def test_the_start_waits_for_enough_of_the_same_versions() -> None:
    """Nor does it take those who came first, if these are too few."""
    group = Group(replicas=8, least=2)
    group.versions.update({f"y{rank}": OTHERS for rank in range(1, 4)})
    group.join("x0")
    group.join("y1")
    group.membership.formations.wait_no_longer()
    effects = group.advance()
    assert (effects.formed, effects.short_of, effects.refused) == ([], 1, {})
    effects = group.join("y2")
    assert {replica.workers for replica in effects.formed} == {("y1",), ("y2",)}
    assert list(effects.refused) == ["x0"]


@pytest.mark.parametrize("ends", ["lost", "dismissed"])
def test_one_that_is_refused_and_gone_at_once_is_not_told_of(ends: str) -> None:
    group = Group(replicas=2, start=1)
    group.start("a0")
    identity = Identity(worker="b1", rank=1, node="n", pid=1, versions=OTHERS)
    group.membership.join(Report(identity=identity))
    if ends == "lost":
        group.membership.lose("b1")
    else:
        group.membership.drain("b1", dismiss=True)
    assert not group.advance().refused


def test_a_coordinator_started_anew_knows_the_runs_versions_by_its_workers() -> None:
    group = Group(replicas=1, generation=3)
    group.resume(standing("a0", 1))
    group.versions["b1"] = OTHERS
    assert list(group.join("b1").refused) == ["b1"]
    assert not group.join("c2").refused and group.membership.places.idle == {"c2"}


def test_a_coordinator_started_anew_knows_them_where_no_replica_stands() -> None:
    """It was lost together with a worker of each: those who are left hold the state."""
    group = Group(replicas=2, each=2, generation=3)
    group.versions.update(y4=OTHERS, y5=OTHERS)
    group.resume(standing("a0", 1), standing("b3", 2))
    group.join("y4")
    effects = group.join("y5")
    assert not effects.formed and group.membership.places.retired == {"y4", "y5"}


# -- the start -------------------------------------------------------------------------------------


def test_the_start_waits_for_everybody_and_puts_neighbours_together() -> None:
    group = Group(replicas=2, each=2, start=5, lanes=3)
    for worker in ("c3", "a1", "e4", "b0"):
        assert group.join(worker) == Effects()
    effects = group.join("d2")
    assert {w: (b.replica, b.rank) for w, b in effects.answers.items() if isinstance(b, Build)} == {
        "b0": (0, 0), "a1": (0, 1), "d2": (1, 0), "c3": (1, 1),
    }  # fmt: skip
    assert group.build("c3", "b0", "d2").answers == {}
    effects = group.build("a1")
    assert layout(effects) == {0: ("b0", "a1"), 1: ("d2", "c3")}
    assert set(effects.answers) == {"b0", "a1", "d2", "c3"}, "the spare goes on waiting"
    run = run_of(effects, "c3")
    assert (run.generation, run.replica, run.rank, run.position) == (1, 1, 1, 1)
    assert run.lanes == ((0, 1), (2,))
    assert (run.step, run.restore, run.commit, run.heals) == (0, True, None, ())
    assert [w for w in effects.answers if run_of(effects, w).lead] == ["b0"]
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.lost_steps) == ("start", 0)


def test_the_start_does_not_wait_for_one_that_is_lost() -> None:
    group = Group(replicas=3)
    assert group.join("a0") == group.join("b1") == Effects()
    effects = group.lose("c2")  # it had started, and never came
    assert {r.workers for r in effects.formed} == {("a0",), ("b1",)}
    assert group.lose("c2").formed == []  # told again
    assert set(layout(group.build("a0", "b1")).values()) == {("a0",), ("b1",)}


@pytest.mark.parametrize("lost", [False, True])
def test_the_start_does_not_wait_for_one_whose_machine_is_no_good(lost: bool) -> None:
    group = Group(replicas=3)
    assert group.join("a0") == Effects()
    group.membership.drain("b1")
    assert group.advance().formed == []
    if lost:  # and then its machine is taken away: it does not count twice
        assert group.lose("b1").formed == []
    assert {r.workers for r in group.join("c2").formed} == {("a0",), ("c2",)}


def test_the_start_does_not_wait_for_workers_that_no_machine_was_found_for() -> None:
    group = Group(replicas=3)
    group.membership.formations.expect(2)
    assert group.join("a0") == Effects()
    assert {r.workers for r in group.join("b1").formed} == {("a0",), ("b1",)}


@pytest.mark.parametrize(("here", "formed"), [(3, 0), (4, 2), (5, 2)])
def test_the_start_waits_no_longer_than_it_must(here: int, formed: int) -> None:
    group = Group(replicas=4, each=2, least=2)
    for rank in range(here):
        group.join(f"w{rank}")
        assert group.advance().short_of == 0, "others may come"
    group.membership.formations.wait_no_longer()
    effects = group.advance()
    assert (len(effects.formed), effects.short_of) == (formed, max(0, 4 - here))


def test_the_start_says_how_many_it_lacks_where_machines_are_no_good() -> None:
    group = Group(replicas=2, each=4, least=1)
    group.nodes = {f"b{rank}": "B" for rank in range(2, 8)}
    for worker in ("a0", "a1"):
        assert group.join(worker).short_of == 0
    for rank in range(2, 7):
        group.membership.drain(f"b{rank}")
        assert group.join(f"b{rank}").short_of == 0, "one more may come"
    group.membership.drain("b7")
    assert group.join("b7").short_of == 2, "those that get no place do not count"
    assert group.join("c8").short_of == 1
    effects = group.join("d9")
    assert effects.short_of == 0 and len(effects.formed) == 1


def test_a_continued_run_starts_at_its_checkpoint_in_a_new_generation() -> None:
    effects = Group(replicas=1, generation=7, restore_step=12).start("a0")
    run = run_of(effects, "a0")
    assert (run.generation, run.step, run.restore, run.recorded) == (8, 12, True, 12)


def test_the_first_roster_has_all_replicas_that_are_forming() -> None:
    group = Group(replicas=2)
    group.join("a0")
    group.join("b1")
    assert group.build("a0").regrouped is None
    assert layout(group.build("b1")) == {0: ("a0",), 1: ("b1",)}


# -- a run that is asked to end --------------------------------------------------------------------


def stopping_group() -> Group:
    """Two replicas and a spare at work, and the run is to end."""
    group = Group(replicas=2, start=3)
    group.start("a0", "b1", "c2")
    group.membership.wind_down()
    return group


def test_a_run_that_is_to_end_saves_what_its_next_boundary_has() -> None:
    group = stopping_group()
    effects = group.advance()
    assert effects.called == "stop" and signals(effects) == {"a0": "boundary", "b1": "boundary"}
    group.join("a0", step=4, last=commit(3, boundary=True))
    effects = group.join("b1", step=4, last=commit(3, boundary=True))
    assert [run_of(effects, w).until for w in ("a0", "b1")] == [4, 4]
    assert group.advance() == Effects()
    group.checkpointed(4)
    group.join("a0", step=4, finished=True)
    assert group.membership.stopped is None
    effects = group.join("b1", step=4, finished=True)
    assert effects.answers == dict.fromkeys(("a0", "b1", "c2"), Stop(error=None))


def test_a_fault_on_the_way_to_the_end_is_met_by_those_who_have_state() -> None:
    group = stopping_group()
    group.advance()
    effects = group.lose("b1")
    assert effects.called == "fault"
    effects = group.join("a0", step=3, in_step=True, last=commit(2))
    assert layout(effects) == {0: ("a0",)}
    assert (run_of(effects, "a0").until, group.membership.until) == (3, 3)
    assert group.build("c2").called is None, "nobody enters any more"
    group.checkpointed(3)
    assert group.join("a0", step=3, finished=True).answers["a0"] == Stop(error=None)


def test_a_worker_lost_while_the_last_state_is_saved_has_it_saved_by_the_others() -> None:
    group = stopping_group()
    group.advance()
    group.join("a0", step=4, last=commit(3, boundary=True))
    group.join("b1", step=4, last=commit(3, boundary=True))
    assert group.lose("a0").called == "fault"
    effects = group.join("b1", step=4, last=commit(3, boundary=True))
    assert layout(effects) == {1: ("b1",)} and run_of(effects, "b1").until == 4


def test_without_state_a_run_that_is_to_end_does_so_at_once() -> None:
    group = Group(replicas=2)
    group.join("a0")
    group.membership.wind_down()
    group.join("b1")
    group.build("a0", "b1")
    assert group.membership.stopped == Stop(error=None)


def test_with_the_last_state_lost_a_run_that_is_to_end_does_so_at_once() -> None:
    group = Group(replicas=1)
    group.start("a0")
    group.membership.wind_down()
    group.advance()
    group.lose("a0")
    assert group.membership.stopped == Stop(error=None)


def test_a_coordinator_started_anew_knows_that_the_run_is_to_end() -> None:
    group = Group(replicas=1)
    last = standing("a0", 1, built=True, proven=True)
    group.membership.wind_down()
    group.membership.resume(
        [last], generation=3, restored=1, formations=1, recorded=5, began=5, until=5
    )
    assert group.advance() == Effects(), "its roster is the last"
    group.checkpointed(5)
    group.built["a0"], group.generations["a0"] = 1, 3
    assert group.join("a0", step=5, finished=True).answers["a0"] == Stop(error=None)


def test_a_last_roster_that_is_in_no_record_is_made_again() -> None:
    """Its workers have done all that they were told to, and the coordinator waited for more."""
    group = Group(replicas=1)
    last = standing("a0", 1, built=True, proven=True)
    group.membership.wind_down()
    group.membership.resume([last], generation=3, restored=1, formations=1, recorded=5, began=4)
    group.membership.progress.checkpointed(5)
    group.built["a0"], group.generations["a0"] = 1, 3
    effects = group.join("a0", step=5, finished=True)
    assert run_of(effects, "a0").until == 5
    assert group.join("a0", step=5, finished=True).answers["a0"] == Stop(error=None)


# -- losses ----------------------------------------------------------------------------------------


def test_a_spare_takes_a_dead_workers_place_while_the_others_train() -> None:
    group = Group(replicas=2, start=3, lanes=4)
    group.start("a0", "b1", "c2")
    effects = group.lose("b1")
    assert effects.called == "fault" and signals(effects) == {"a0": "fault"}
    assert [(r.index, r.workers) for r in effects.formed] == [(1, ("c2",))]
    assert effects.regrouped is None

    effects = group.join("a0", step=3, in_step=True, last=commit(2))
    run = run_of(effects, "a0")
    assert (run.step, run.lanes, run.heals, run.restore) == (3, ((0, 1, 2, 3),), (), False)
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.lost_steps) == ("repeat", 0)

    effects = group.build("c2")
    assert effects.called == "grow" and signals(effects) == {"a0": "boundary"}
    effects = group.join("a0", step=5, last=commit(4, boundary=True))
    assert layout(effects) == {0: ("a0",), 1: ("c2",)}
    run = run_of(effects, "c2")
    assert run.lanes == ((0, 1, 2, 3), ()), "a newcomer has no state to compute with"
    assert (run.step, pairs(run), run.restore) == (5, {1: 0}, False)
    assert run.commit == commit(4, boundary=True)
    assert effects.regrouped is not None and effects.regrouped.outcome == "boundary"

    assert group.membership.caught_up("c2") == Replica(index=1, formed=3, workers=("c2",))
    effects = group.advance()
    assert effects.called == "heal"
    assert signals(effects) == {"a0": "boundary", "c2": "boundary"}
    group.join("a0", step=8, last=commit(7, boundary=True))
    effects = group.join("c2", step=8, last=commit(7, boundary=True))
    run = run_of(effects, "c2")
    assert run.lanes == ((0, 1), (2, 3)), "dealt anew at a boundary"
    assert (run.step, run.heals, run.restore) == (8, (), False)


def test_a_newcomer_that_got_the_state_in_a_fault_gets_lanes_at_the_next_boundary() -> None:
    """A fault leaves all lanes where they are, though nobody was lost."""
    group = Group(replicas=2, start=3, lanes=4)
    group.start("a0", "b1", "c2")
    group.lose("b1")
    group.join("a0", step=3, in_step=True, last=commit(2))
    group.build("c2")
    group.join("a0", step=5, last=commit(4, boundary=True))
    group.membership.cross_lost(group.membership.roster.generation, "reset")
    group.advance()
    group.join("a0", step=5, in_step=True, last=commit(4))
    effects = group.join("c2", step=5, in_step=True, last=commit(4))  # it has come just now
    run = run_of(effects, "c2")
    assert (run.lanes, run.heals) == (((0, 1, 2, 3), ()), ())
    assert effects.called == "heal" or group.advance().called == "heal"
    group.join("a0", step=6, last=commit(5, boundary=True))
    effects = group.join("c2", step=6, last=commit(5, boundary=True))
    assert run_of(effects, "c2").lanes == ((0, 1), (2, 3))
    assert group.advance().called is None


def test_without_a_spare_the_replacement_grows_the_run_again() -> None:
    group = Group(replicas=2)
    group.start("a0", "b1")
    assert group.lose("b1").formed == []
    assert layout(group.join("a0", step=3, in_step=True)) == {0: ("a0",)}
    effects = group.join("c1")
    assert [(r.index, r.workers) for r in effects.formed] == [(1, ("c1",))]
    assert effects.called is None
    assert group.build("c1").called == "grow"


def test_a_fault_leaves_lanes_that_are_computed_where_they_are() -> None:
    group = Group(replicas=3, lanes=6)
    group.start("a0", "b1", "c2")
    group.lose("a0")
    group.join("b1", step=3, in_step=True)
    effects = group.join("c2", step=3, in_step=True)
    assert run_of(effects, "b1").lanes == ((0, 2, 3), (1, 4, 5))


def test_the_death_of_a_spare_calls_nobody() -> None:
    group = Group(replicas=1, start=2)
    group.start("a0", "b1")
    effects = group.lose("b1")
    assert effects == Effects()
    assert group.membership.members.keys() == {"a0"}


def test_a_death_while_forming_frees_the_others_for_a_new_formation() -> None:
    group = Group(replicas=1, each=2, start=3)
    for worker in ("a0", "b1", "c2"):
        group.join(worker)
    first = group.built["a0"]
    effects = group.lose("b1")
    assert signals(effects) == {"a0": "fault"} and effects.called is None
    assert group.membership.replica_broken("a0")
    effects = group.join("a0", built=0)
    assert effects.formed[0].workers == ("a0", "c2") and effects.formed[0].formed > first
    answer = effects.answers["a0"]
    assert isinstance(answer, Build) and answer.serial == 1, "the call is settled"
    assert layout(group.build("a0", "c2")) == {0: ("a0", "c2")}


def test_a_worker_that_is_ready_when_its_formation_breaks_builds_again() -> None:
    group = Group(replicas=1, each=2)
    group.join("a0")
    group.join("b1")
    group.build("a0")
    assert group.lose("b1").signals == {}, "it waits: nothing to call it away from"
    assert group.join("c1").formed[0].workers == ("a0", "c1")


def test_without_state_the_survivors_of_two_replicas_make_one() -> None:
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.lose("b1")
    assert group.lose("c2").called is None, "they are called already"
    group.join("a0", built=0)
    effects = group.join("d3", built=0)
    assert [(r.index, r.workers) for r in effects.formed] == [(0, ("a0", "d3"))]


def test_when_all_die_the_run_goes_back_to_the_checkpoint() -> None:
    group = Group(replicas=2, each=1)
    group.start("a0", "b1")
    group.membership.progress.record(6)
    group.checkpointed(4)
    group.lose("a0")
    group.lose("b1")
    group.join("c0")
    group.join("d1")
    group.build("c0")
    effects = group.build("d1")
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.lost_steps) == ("restore", 3)
    assert layout(effects) == {0: ("c0",), 1: ("d1",)}
    run = run_of(effects, "d1")
    assert (run.step, run.restore, run.recorded, run.heals) == (4, True, 4, ())


@pytest.mark.parametrize(
    ("snapshot", "step", "source", "lost"),
    [(6, 6, "memory", 1), (4, 4, "store", 3), (0, 4, "store", 3)],
)
def test_when_all_die_the_newer_of_snapshot_and_checkpoint_counts(
    snapshot: int, step: int, source: str, lost: int
) -> None:
    group = Group(replicas=1)
    group.start("a0")
    group.membership.progress.record(6)
    group.checkpointed(4)
    group.membership.progress.snapshotted(6)
    group.membership.progress.snapshotted(snapshot)
    group.lose("a0")
    group.join("b0")
    effects = group.build("b0")
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.lost_steps) == ("restore", lost)
    run = run_of(effects, "b0")
    assert (run.step, run.restore, run.source, run.recorded) == (step, True, source, step)


def test_a_snapshot_that_cannot_be_read_leads_to_the_checkpoint() -> None:
    group = Group(replicas=1, generation=3, restore_step=4, snapshot_step=6)
    run = run_of(group.start("a0"), "a0")
    assert (run.step, run.source, run.recorded) == (6, "memory", 6)
    group.membership.progress.snapshotted(0)
    effects = group.join("a0")
    run = run_of(effects, "a0")
    assert (run.generation, run.step, run.restore, run.source) == (5, 4, True, "store")
    assert effects.regrouped is not None and effects.regrouped.lost_steps == 2


def test_a_replica_that_read_the_snapshot_heals_one_that_could_not() -> None:
    group = Group(replicas=2, restore_step=4, snapshot_step=6)
    group.start("a0", "b1")
    group.membership.progress.snapshotted(0)
    assert group.join("b1").called == "fault"
    run = run_of(group.join("a0", step=6, in_step=True), "b1")
    assert (run.step, run.restore, run.source, pairs(run)) == (6, False, "store", {1: 0})


def test_fewer_than_the_minimum_wait_and_say_how_many_are_missing() -> None:
    group = Group(replicas=3, each=2, least=2)
    group.start("a0", "b1", "c2", "d3", "e4", "f5")
    for worker in ("a0", "b1", "c2", "d3"):
        group.lose(worker)
    assert group.join("e4", step=3, in_step=True).short_of == 0, "not known before all are here"
    effects = group.join("f5", step=3, in_step=True)
    assert effects.regrouped is None and effects.short_of == 2
    effects = group.join("g0")
    assert effects.regrouped is None and effects.short_of == 1
    effects = group.join("h1")
    assert effects.short_of == 0 and len(effects.formed) == 1
    effects = group.build("g0", "h1")
    assert layout(effects) == {0: ("g0", "h1"), 2: ("e4", "f5")}
    run = run_of(effects, "e4")
    assert (run.step, run.restore) == (3, False), "the state was kept in memory"


def test_a_lost_worker_stays_lost() -> None:
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    assert group.membership.lose("d3") is not None
    assert group.membership.lose("d3") is None
    group.advance()
    effects = group.join("d3", step=3, in_step=True)
    stop = effects.answers["d3"]
    assert isinstance(stop, Stop) and stop.error is not None
    assert "d3" not in group.membership.members
    assert group.membership.replica_broken("c2")


def test_a_call_to_join_may_arrive_after_the_news_of_its_death() -> None:
    group = Group(replicas=1)
    group.membership.lose("a0")
    assert group.join("a0").formed == []
    assert group.join("b0").formed[0].workers == ("b0",)


@pytest.mark.parametrize("lost", [False, True])
def test_a_spare_that_is_gone_or_will_go_gets_no_place(lost: bool) -> None:
    group = Group(replicas=1)
    group.start("a0", "b1", "c2")
    if lost:
        group.lose("b1")
    else:
        group.membership.drain("b1")
    assert [replica.workers for replica in group.lose("a0").formed] == [("c2",)]


# -- replicas that lose a worker and are made whole again ------------------------------------------


def with_a_follower(*spares: str, least: int = 1) -> tuple[Group, Effects]:
    """Replica 1 has lost c2; d3 has the state of rank 1, and follows. What the roster said."""
    group = Group(replicas=2, each=2, least=least, start=4 + len(spares), lanes=4)
    group.start("a0", "b1", "c2", "d3", *spares)
    effects = group.lose("c2")
    assert signals(effects) == dict.fromkeys(("a0", "b1", "d3"), "fault")
    assert effects.signals["d3"].broken and not effects.formed
    group.join("a0", step=3, in_step=True, last=commit(2), rank=0)
    assert group.join("b1", step=3, in_step=True, last=commit(2), rank=1).regrouped is None
    return group, group.join("d3", step=3, in_step=True, last=commit(2), rank=1, built=0)


def test_who_follows_keeps_the_name_of_its_slot() -> None:
    """Its loss stops the others as well."""
    group, _ = with_a_follower()
    assert group.membership.slot_name("d3") == "replica 1 shard 0 tensor 1"


def test_who_is_left_of_a_replica_follows_and_builds_it_whole_meanwhile() -> None:
    group, effects = with_a_follower("e4")
    assert layout(effects) == {0: ("a0", "b1")}
    assert [(r.index, r.workers) for r in effects.formed] == [(1, ("e4", "d3"))]
    assert kept(effects) == {"e4": False}
    run = run_of(effects, "d3")
    assert run.follows and (run.replica, run.rank, run.position) == (1, 1, 1)
    assert run.build is not None and (run.build.formed, run.build.keep) == (3, True)
    assert run.lanes_of(0) == [(0, 1, 2, 3)] and run.lanes_of(1) == [(0, 1, 2, 3), ()]
    assert not run.lacks_state and not run_of(effects, "a0").follows

    assert group.build("e4").called is None, "d3 has not built its part"
    group.membership.built("d3", 2)
    assert group.advance() == Effects(), "news of another formation"
    group.membership.built("d3", 3)
    effects = group.advance()
    assert effects.called == "grow"
    assert signals(effects) == dict.fromkeys(("a0", "b1", "d3"), "boundary")
    for rank, worker in enumerate(("a0", "b1")):
        group.join(worker, step=5, last=commit(4, boundary=True), rank=rank)
    effects = group.join("d3", step=5, last=commit(4, boundary=True), rank=1, built=3)
    assert layout(effects) == {0: ("a0", "b1"), 1: ("e4", "d3")}
    assert run_of(effects, "e4").heals == ((1, 0, (0,)),)
    assert {w: run_of(effects, w).lacks_state for w in effects.answers} == {
        "a0": False, "b1": False, "e4": True, "d3": False,
    }  # fmt: skip
    assert (run_of(effects, "d3").formed, run_of(effects, "d3").followers) == (3, (0, 0))
    group.membership.caught_up("e4")
    assert group.advance().called == "heal", "it was the only one without state"


def test_without_a_spare_it_follows_until_somebody_comes() -> None:
    group, effects = with_a_follower()
    assert run_of(effects, "d3").build is None and not effects.formed
    effects = group.join("e2")
    assert effects.called == "repair" and not effects.formed
    group.join("a0", step=9, last=commit(8, boundary=True), rank=0)
    group.join("b1", step=9, last=commit(8, boundary=True), rank=1)
    effects = group.join("d3", step=9, last=commit(8, boundary=True), rank=1, built=0)
    assert [replica.workers for replica in effects.formed] == [("e2", "d3")]
    assert run_of(effects, "d3").build is not None


def test_a_follower_that_is_called_before_it_has_built_its_part_goes_on_building() -> None:
    """It builds beside the steps: its peers in there need not begin anew."""
    group, _ = with_a_follower("e4")
    group.membership.cross_lost(group.membership.roster.generation, "reset")
    assert signals(group.advance()) == dict.fromkeys(("a0", "b1", "d3"), "fault")
    for rank, worker in enumerate(("a0", "b1")):
        group.join(worker, step=3, in_step=True, last=commit(2), rank=rank)
    effects = group.join("d3", step=3, in_step=True, last=commit(2), rank=1, built=0)
    assert effects.formed == [] and not group.membership.replica_broken("e4", 3)
    run = run_of(effects, "d3")
    assert run.build is not None and run.build.formed == 3


def test_spares_that_a_repair_does_not_need_form_a_replica_before_it() -> None:
    group = Group(replicas=3, each=2, start=4, lanes=4)
    group.start("a0", "b1", "c2", "d3")
    group.lose("c2")
    for rank, worker in enumerate(("a0", "b1")):
        group.join(worker, step=3, in_step=True, last=commit(2), rank=rank)
    group.join("d3", step=3, in_step=True, last=commit(2), rank=1, built=0)
    assert group.join("e4").called == "repair"
    assert group.join("f5").formed == []
    assert [replica.workers for replica in group.join("g6").formed] == [("f5", "g6")]


def test_one_that_missed_the_commit_finishes_the_step_as_it_follows() -> None:
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.lose("c2")
    group.join("a0", step=4, last=commit(3), rank=0)
    group.join("b1", step=4, last=commit(3), rank=1)
    effects = group.join("d3", step=3, in_step=True, last=commit(2), rank=1, built=0)
    assert run_of(effects, "d3").follows and run_of(effects, "d3").commit == commit(3)


def test_one_without_the_state_of_the_others_does_not_follow() -> None:
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.lose("c2")
    group.join("a0", step=4, last=commit(3), rank=0)
    group.join("b1", step=4, last=commit(3), rank=1)
    effects = group.join("d3", step=3, last=commit(2), rank=1, built=0)
    assert layout(effects) == {0: ("a0", "b1")} and "d3" not in effects.answers
    assert [replica.workers for replica in group.join("e2").formed] == [("e2", "d3")]


def test_the_end_of_a_follower_interrupts_the_step_of_the_others() -> None:
    group, _ = with_a_follower("e4")
    effects = group.lose("d3")
    assert effects.called == "fault"
    assert signals(effects) == {"a0": "fault", "b1": "fault", "e4": "fault"}
    assert group.membership.replica_broken("e4")


@pytest.mark.parametrize("ends", [False, True], ids=["its machine goes", "it is to end"])
def test_a_follower_that_will_go_is_let_go_after_a_step(ends: bool) -> None:
    """Its machine's end broke the step of the others; told to end, it was killed."""
    group, _ = with_a_follower()
    group.membership.drain("d3", dismiss=ends)
    effects = group.advance()
    assert effects.called == "drain"
    assert signals(effects) == dict.fromkeys(("a0", "b1", "d3"), "boundary")
    assert group.membership.needs("d3"), "the step of the others would break with its machine"
    effects = group.join("d3", step=5, last=commit(4, boundary=True), rank=1, built=0)
    assert effects.answers == ({"d3": Stop(error=None)} if ends else {})
    group.join("a0", step=5, last=commit(4, boundary=True), rank=0)
    assert group.membership.needs("d3"), "its end would make a fault of the call"
    effects = group.join("b1", step=5, last=commit(4, boundary=True), rank=1)
    assert layout(effects) == {0: ("a0", "b1")} and not group.membership.needs("d3")
    assert run_of(effects, "b1").followers == (0, 0)
    assert group.lose("d3").called is None, "nothing is repeated"


def test_a_follower_goes_on_where_the_one_that_was_to_complete_its_replica_dies() -> None:
    group, _ = with_a_follower("e4")
    effects = group.lose("e4")
    assert effects.signals == {} and effects.called is None
    assert group.membership.replica_broken("d3", 3), "its error there is not its own fault"
    assert group.join("f4").called == "repair"


def test_with_too_few_replicas_to_go_on_a_replica_is_made_whole_at_once() -> None:
    group, effects = with_a_follower("e4", least=2)
    assert effects.regrouped is None
    assert kept(effects) == {"e4": False, "d3": True}
    group.build("e4")
    effects = group.join("d3", step=3, in_step=True, last=commit(2), rank=1)
    assert layout(effects) == {0: ("a0", "b1"), 1: ("e4", "d3")}
    assert run_of(effects, "e4").heals == ((1, 0, (0,)),)


def test_what_is_left_of_two_replicas_makes_one_that_needs_no_heal() -> None:
    group = Group(replicas=3, each=2)
    group.start("a0", "b1", "c2", "d3", "e4", "f5")
    group.lose("b1")
    group.lose("c2")
    for rank, worker in enumerate(("a0", "d3")):
        group.join(worker, step=3, in_step=True, rank=rank, built=0)
    group.join("e4", step=3, in_step=True, rank=0)
    effects = group.join("f5", step=3, in_step=True, rank=1)
    assert layout(effects) == {2: ("e4", "f5")}
    assert [(r.index, r.workers) for r in effects.formed] == [(0, ("a0", "d3"))]
    for worker in ("a0", "d3"):
        assert run_of(effects, worker).follows
        group.membership.built(worker, 4)
    assert group.advance().called == "grow"
    for rank, worker in enumerate(("a0", "d3", "e4", "f5")):
        built = 4 if worker in ("a0", "d3") else 3
        effects = group.join(worker, step=6, last=commit(5), rank=rank % 2, built=built)
    assert layout(effects) == {0: ("a0", "d3"), 2: ("e4", "f5")}
    run = run_of(effects, "a0")
    assert run.heals == () and run.lanes == ((0, 1), (2,)), "it has lanes at once"


# -- commits that not all have seen ----------------------------------------------------------------


def test_a_commit_that_one_replica_saw_is_handed_to_those_behind() -> None:
    group = Group(replicas=3)
    group.start("a0", "b1", "c2")
    group.lose("c2")
    group.join("a0", step=3, in_step=True, last=commit(2))
    effects = group.join("b1", step=4, in_step=True, last=commit(3))
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.step) == ("finish_step", 4)
    assert run_of(effects, "a0").commit == commit(3)


def test_new_replicas_heal_from_old_ones_in_turn() -> None:
    group = Group(replicas=4, start=2, least=2)
    group.start("a0", "b1")
    group.join("c2")
    group.join("d3")
    group.build("c2")
    group.build("d3")
    group.join("a0", step=6)
    effects = group.join("b1", step=6)
    places = {run_of(effects, w).replica: run_of(effects, w).position for w in effects.answers}
    heals = pairs(run_of(effects, "d3"))
    assert heals.keys() == {places[2], places[3]}
    assert set(heals.values()) == {places[0], places[1]}


def test_a_heal_that_failed_is_repeated_even_when_a_boundary_was_called() -> None:
    group = Group(replicas=3, start=2, least=1)
    group.start("a0", "b1")
    group.lose("b1")
    group.join("a0", step=3, in_step=True)
    group.join("c1")
    group.build("c1")
    group.join("a0", step=5)
    group.join("d2")
    assert group.build("d2").called is None, "it would disturb the heal"
    effects = group.join("c1", step=None, in_step=True)
    assert effects.called == "fault" and signals(effects) == {"a0": "fault"}
    effects = group.join("a0", step=5, in_step=True)
    place = {worker: run_of(effects, worker).position for worker in effects.answers}
    heals = pairs(run_of(effects, "c1"))
    assert heals == {place["c1"]: place["a0"], place["d2"]: place["a0"]}


def test_a_heal_that_failed_is_tried_again_from_another_source() -> None:
    group = Group(replicas=3, start=3)
    group.start("a0", "b1", "c2")
    group.lose("c2")
    group.join("a0", step=3, in_step=True)
    group.join("b1", step=3, in_step=True)
    group.join("d2")
    group.build("d2")
    group.join("a0", step=5)
    first = run_of(group.join("b1", step=5), "d2")
    assert group.membership.heals.failed("d2") == 1
    effects = group.advance()
    assert effects.called == "heal" and set(signals(effects)) == {"a0", "b1", "d2"}
    group.join("a0", step=6)
    group.join("b1", step=6)
    again = run_of(group.join("d2"), "d2")
    assert pairs(again)[2] != pairs(first)[2]
    assert group.membership.heals.failed("d2") == 2


def test_survivors_of_all_replicas_put_their_copy_together() -> None:
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.lose("b1")
    effects = group.lose("c2")
    assert not effects.formed
    group.join("a0", step=7, in_step=True, last=commit(6), built=0, rank=0, generation=1)
    effects = group.join("d3", step=8, last=commit(7), built=0, rank=1, generation=1)
    assert [replica.workers for replica in effects.formed] == [("a0", "d3")]
    builds = [answer for answer in effects.answers.values() if isinstance(answer, Build)]
    assert [build.keep for build in builds] == [True, True]
    group.join("a0", step=7, in_step=True, last=commit(6), rank=0, generation=1)
    effects = group.join("d3", step=8, last=commit(7), rank=1, generation=1)
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.lost_steps) == ("finish_step", 0)
    run = run_of(effects, "a0")
    assert (run.step, run.commit, run.restore, run.heals) == (8, commit(7), False, ())


def with_a_newcomer() -> Group:
    """Replica 2 has come and has no state yet; replica 1 has lost d3, and c2 follows."""
    group = Group(replicas=3, each=2, start=4)
    group.start("a0", "b1", "c2", "d3")
    group.join("e4")
    group.join("f5")
    group.build("e4", "f5")
    for rank, worker in enumerate(("a0", "b1", "c2", "d3")):
        group.join(worker, step=6, last=commit(5, boundary=True), rank=rank % 2)
    group.lose("d3")
    group.join("e4")
    group.join("f5")
    group.join("c2", step=7, in_step=True, last=commit(6), built=0, rank=0)
    group.join("a0", step=7, in_step=True, last=commit(6), rank=0)
    effects = group.join("b1", step=7, in_step=True, last=commit(6), rank=1)
    assert layout(effects) == {0: ("a0", "b1"), 2: ("e4", "f5")}
    assert pairs(run_of(effects, "e4")) == {1: 0} and run_of(effects, "c2").follows
    return group


def test_survivors_put_their_copy_together_beside_a_newcomer_without_state() -> None:
    group = with_a_newcomer()
    group.lose("a0")
    group.join("e4")
    group.join("f5")
    effects = group.join("c2", step=7, in_step=True, last=commit(6), built=0, rank=0)
    assert effects.formed == [], "b1 is still to come"
    effects = group.join("b1", step=7, in_step=True, last=commit(6), built=0, rank=1)
    assert [replica.workers for replica in effects.formed] == [("c2", "b1")]
    assert effects.regrouped is None, "nobody goes back while they build"
    group.join("c2", step=7, in_step=True, last=commit(6), rank=0)
    effects = group.join("b1", step=7, in_step=True, last=commit(6), rank=1)
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.step) == ("repeat", 7)
    assert layout(effects) == {0: ("c2", "b1"), 2: ("e4", "f5")}
    assert pairs(run_of(effects, "e4")) == {1: 0}


@pytest.mark.parametrize("entered", [False, True], ids=["forming", "newcomers"])
def test_survivors_put_their_copy_together_where_successors_have_all_the_room(
    entered: bool,
) -> None:
    """A machine with a worker of each replica was to go, and goes before their successors have
    state."""
    group = Group(replicas=2, each=2, least=1 if entered else 2)
    group.start("a0", "b1", "c2", "d3")
    group.membership.drain("b1")
    group.membership.drain("c2")
    successors = "e4", "f5", "g6", "h7"
    for worker in successors:
        effects = group.join(worker)
    assert [replica.index for replica in group.membership.places.forming.values()] == [2, 3]
    if entered:
        group.build(*successors)
        for rank, worker in enumerate(("a0", "b1", "c2", "d3")):
            effects = group.join(worker, step=6, last=commit(5, boundary=True), rank=rank % 2)
        assert len(layout(effects)) == 4
    group.lose("b1")
    group.lose("c2")
    if entered:
        for rank, worker in enumerate(successors):
            group.join(worker, rank=rank % 2)
    group.join("a0", step=7, in_step=True, last=commit(6), built=0, rank=0)
    effects = group.join("d3", step=7, in_step=True, last=commit(6), built=0, rank=1)
    assert kept(effects) == {"a0": True, "d3": True}
    youngest = successors[2:]
    assert set(youngest) <= effects.signals.keys() | set(group.membership.places.idle)
    assert all(map(group.membership.replica_broken, youngest))
    group.build("e4", "f5")
    group.join("a0", step=7, in_step=True, last=commit(6), rank=0)
    effects = group.join("d3", step=7, in_step=True, last=commit(6), rank=1)
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.lost_steps) == ("repeat", 0)
    assert layout(effects) == {0: ("a0", "d3"), 1: ("e4", "f5")}


def test_a_newcomer_that_has_its_part_already_is_one_of_them() -> None:
    group = with_a_newcomer()
    group.lose("c2")
    group.lose("b1")
    group.join("a0", step=8, last=commit(7), built=0, rank=0)
    group.join("e4")
    effects = group.join("f5", step=8, last=commit(7), rank=1)
    assert [replica.workers for replica in effects.formed] == [("a0", "f5")]
    assert effects.formed[0].index == 0
    assert group.membership.replica_broken("e4"), "it waits for a place"


def test_answers_of_a_regroup_that_not_all_have_heard_cost_nothing() -> None:
    """The coordinator died between them: one is of a newer roster, in which nothing was done."""
    group = Group(replicas=1, each=2)
    group.start("a0", "b1")
    group.membership.call = "fault"
    group.join("a0", step=7, last=commit(6), rank=0, generation=2)
    effects = group.join("b1", step=6, in_step=True, last=commit(5), rank=1, generation=1)
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.step) == ("finish_step", 7)


def test_one_that_alone_heard_of_a_regroup_and_caught_up_is_level_with_the_others() -> None:
    group = Group(replicas=1, each=2)
    group.start("a0", "b1")
    group.membership.call = "fault"
    group.join("a0", step=7, last=commit(6), rank=0, generation=1)
    effects = group.join("b1", step=7, last=commit(6), rank=1, generation=2)
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.step) == ("boundary", 7)


def test_a_worker_whose_peer_alone_got_the_answer_lets_go_of_their_replica() -> None:
    """The peer waits for it in a collective of their replica, and hears no call there."""
    group = Group(replicas=1, each=2)
    group.resume(standing("a0", 1), standing("b1", 1, generation=2, rank=1))
    effects = group.join("b1", 5, built=1, rank=1, generation=2)
    assert effects.answers == {"b1": Leave()}
    assert effects.signals["a0"] == Signal(serial=1, kind="fault", broken=True)
    assert group.membership.replica_broken("a0"), "its error is not its own fault"
    assert group.join("b1", 5, rank=1, generation=2).answers == {}
    assert kept(group.join("a0", 5, in_step=True, generation=3)) == {"a0": True, "b1": True}
    group.join("a0", 5, in_step=True, generation=3)
    effects = group.join("b1", 5, rank=1, generation=2)
    assert run_of(effects, "a0").step == 5 and not run_of(effects, "a0").restore


@pytest.mark.parametrize("in_step", [False, True])
def test_who_left_before_the_last_step_is_a_newcomer_again(in_step: bool) -> None:
    """A coordinator that was started anew took it for one of the roster. What it holds of the step
    is of an attempt that was given up when it left."""
    group = Group(replicas=2)
    group.start("a0", "b1")
    group.membership.call = "fault"
    group.join("a0", step=7, in_step=True, last=commit(6, generation=2), generation=2)
    effects = group.join("b1", step=6, in_step=in_step, last=commit(5), generation=1)
    assert effects.regrouped is not None and effects.regrouped.step == 7
    assert pairs(run_of(effects, "b1")) == {1: 0}


def test_nobody_goes_on_where_one_that_left_long_ago_stands() -> None:
    """All that went on without it are lost: the checkpoint is newer than its state."""
    group = Group(replicas=2, restore_step=4)
    group.resume(standing("a0", 1, generation=2), recorded=6)
    effects = group.join("a0", step=3, last=commit(2), built=1, generation=2)
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.step) == ("restore", 4)


def test_survivors_put_their_copy_together_beside_one_that_left_long_ago() -> None:
    group = Group(replicas=2, each=2, restore_step=4)
    group.resume(
        standing("a0", 1, generation=2),
        standing("b1", 1, generation=2, rank=1),
        standing("c2", 2, replica=1),
        standing("d3", 3, replica=2, rank=1),
        recorded=6,
    )
    for rank, worker in enumerate(("a0", "b1")):
        group.join(worker, step=3, built=1, rank=rank, generation=2)
    group.join("c2", step=6, last=commit(5, generation=3), generation=3)
    effects = group.join("d3", step=5, in_step=True, rank=1, generation=3)
    assert kept(effects) == {"c2": True, "d3": True}


def test_what_survivors_put_together_is_waited_for_by_a_coordinator_started_anew() -> None:
    group = Group(replicas=2, each=2, restore_step=4)
    group.resume(
        standing("a0", 1),
        standing("b1", 1, rank=1),
        standing("c2", 4, generation=0, built=True, kept=True, replica=1),
        standing("d3", 4, generation=0, built=True, kept=True, replica=1, rank=1),
        recorded=6,
    )
    for rank, worker in enumerate(("a0", "b1")):  # newcomers when the others broke
        effects = group.join(worker, built=1, rank=rank, generation=3)
    assert effects.regrouped is None, "the checkpoint is older than what c2 and d3 hold"
    group.join("c2", step=6, last=commit(5), built=4, generation=2)
    effects = group.join("d3", step=6, last=commit(5), built=4, rank=1, generation=2)
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.step) == ("boundary", 6)


def test_survivors_who_build_are_put_together_again_by_a_coordinator_started_anew() -> None:
    """Their process group was to meet at the store that is lost: one that has no connection to it
    yet goes on trying until it is called."""
    group = Group(replicas=2, each=2, restore_step=4)
    group.resume(
        standing("a0", 1, source=1, behind=True),
        standing("b1", 1, rank=1, source=1, behind=True),
        standing("c2", 4, generation=0, built=True, kept=True, replica=1),
        standing("d3", 4, generation=0, kept=True, replica=1, rank=1),
        recorded=6,
    )
    effects = group.advance()
    assert {worker for worker, signal in effects.signals.items() if signal.broken} == {"c2", "d3"}
    assert group.membership.replica_broken("d3"), "its error is not its own fault"
    for rank, worker in enumerate(("a0", "b1")):
        effects = group.join(worker, built=1, rank=rank, generation=3)
    assert effects.regrouped is None, "the checkpoint is older than what c2 and d3 hold"
    group.join("c2", step=6, last=commit(5), built=4, generation=2)
    effects = group.join("d3", step=6, last=commit(5), rank=1, generation=2)
    assert kept(effects) == {"c2": True, "d3": True}


def test_survivors_in_no_formation_are_waited_for_by_a_coordinator_started_anew() -> None:
    """The answer that was to put them together was lost with the last one."""
    group = Group(replicas=1, each=2)
    group.resume(
        standing("a0", 0, generation=0),
        standing("b1", 0, generation=0),
    )
    group.join("c2")
    assert group.join("d3").formed == []
    group.join("a0", step=5, rank=0, generation=3)
    effects = group.join("b1", step=5, rank=1, generation=3)
    assert kept(effects) == {"a0": True, "b1": True}


def test_nobody_leaves_while_it_is_not_sure_that_others_have_the_state() -> None:
    """b1, which was healing, had no answer in the last roster."""
    group = Group(replicas=2)
    late = standing("b1", 2, generation=2, replica=1, source=0, behind=True)
    group.resume(standing("a0", 1), late, recorded=6)
    group.membership.drain("a0")
    group.join("b1", None, built=2, generation=2)
    last = commit(5, generation=2)
    effects = group.join("a0", step=6, last=last, built=1, generation=3)
    assert layout(effects).keys() == {0, 1} and not run_of(effects, "b1").restore


def test_a_worker_of_a_replica_that_was_taken_apart_is_waited_for() -> None:
    """b1 and c2 were to be put together; only d3 got its answer, to build in b1's place."""
    group = Group(replicas=2, each=2)
    group.resume(
        standing("a0", 0, generation=0),
        standing("b1", 2, replica=1, rank=0, source=0, behind=True),
        standing("c2", 2, replica=1, rank=1, source=0, behind=True),
        standing("d3", 4, generation=0, replica=1, rank=1),
        recorded=6,
    )
    group.join("a0", step=6, in_step=True, last=commit(5), rank=1, generation=3)
    group.join("b1", step=6, in_step=True, last=commit(5), built=2, rank=0, generation=3)
    assert group.join("c2", None, built=2, rank=1, generation=3).formed == []
    answers = kept(group.join("d3"))
    assert answers == {"b1": True, "a0": True, "c2": False, "d3": False}


def test_what_was_void_is_void_for_a_coordinator_started_anew() -> None:
    """Survivors of before the run went back to a checkpoint."""
    group = Group(replicas=1, each=2, restore_step=4)
    group.resume(standing("c2", 1), restored=3, recorded=4)
    for rank, worker in enumerate(("a0", "b1")):
        group.join(worker, step=6, last=commit(5), rank=rank, generation=2)
    assert kept(group.lose("c2")) == {"a0": False, "b1": False}


def test_a_way_back_to_the_seed_that_is_meant_does_not_end_the_run() -> None:
    """A checkpoint was found damaged; going back to the seed for lack of another would end it."""
    group = Group(replicas=1, restore_step=8)
    group.membership.progress.checkpoint_lost(newest=4, reason="damaged")
    effects = group.start("a0")
    assert effects.regrouped is not None and effects.regrouped.step == 4
    group.membership.go_back(0)
    group.membership.advance()
    effects = group.join("a0", step=5, last=commit(4), built=0)
    assert group.membership.stopped is None
    assert effects.regrouped is not None and effects.regrouped.step == 0


def test_parts_of_two_attempts_at_a_step_are_no_copy() -> None:
    """a0 alone saw step 6 committed in generation 1; the others did it once more in generation 2.
    Without `reduction="exact"` their bits may differ."""
    group = Group(replicas=2, each=2, restore_step=4)
    group.start("a0", "b1", "c2", "d3")
    group.membership.drain("a0")  # nobody waits for it
    group.lose("b1")
    for worker in ("c2", "d3"):
        group.join(worker, step=6, in_step=True, last=commit(5))
    group.lose("c2")
    group.join("a0", step=7, last=commit(6), built=0, rank=0)
    last = commit(6, generation=2)
    effects = group.join("d3", step=7, in_step=True, last=last, built=0, rank=1)
    assert kept(effects) == {}
    assert kept(group.join("e6")) == {"d3": False, "e6": False}


def test_one_that_is_ahead_of_all_others_hides_no_copy() -> None:
    """a0 saw step 6 committed and left; the others did it once more, and hold a copy before it."""
    group = Group(replicas=3, each=2, restore_step=4)
    group.start("a0", "b1", "c2", "d3", "e4", "f5")
    group.membership.drain("a0")  # nobody waits for it, or asks it
    group.lose("b1")
    group.join("a0", step=7, last=commit(6), built=0, rank=0)
    for rank, worker in enumerate(("c2", "d3", "e4", "f5")):
        effects = group.join(worker, step=6, in_step=True, last=commit(5), rank=rank % 2)
    assert effects.regrouped is not None and effects.regrouped.step == 6
    group.lose("d3")
    group.lose("e4")
    group.join("c2", step=6, in_step=True, last=commit(5), built=0, rank=0)
    effects = group.join("f5", step=6, in_step=True, last=commit(5), built=0, rank=1)
    assert kept(effects) == {"c2": True, "f5": True}


def test_survivors_that_lack_a_shard_go_back_to_the_checkpoint() -> None:
    group = Group(replicas=2, each=2, restore_step=4)
    group.start("a0", "b1", "c2", "d3")
    group.lose("b1")
    group.lose("d3")
    group.join("a0", step=7, in_step=True, last=commit(6), built=0, rank=0, generation=1)
    effects = group.join("c2", step=7, in_step=True, last=commit(6), built=0, rank=0, generation=1)
    assert [replica.workers for replica in effects.formed] == [("a0", "c2")]
    effects = group.build("a0", "c2")
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.step) == ("restore", 4)
    assert effects.regrouped.lost_steps == 3


def test_a_machine_with_what_may_be_the_only_copy_is_needed_until_that_is_decided() -> None:
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.lose("b1")
    group.lose("c2")
    a0: dict[str, Any] = {"step": 7, "in_step": True, "last": commit(6), "rank": 0, "generation": 1}
    d3: dict[str, Any] = {"step": 8, "last": commit(7), "rank": 1, "generation": 1}
    group.join("a0", built=0, **a0)
    assert group.join("d3", built=0, **d3).formed
    group.membership.drain("d3")  # what forms is given up
    assert signals(group.advance()) == {"a0": "fault", "d3": "fault"}
    group.join("d3", **d3)
    assert group.membership.needs("d3")
    effects = group.join("a0", **a0)
    assert kept(effects) == {"a0": True, "d3": True} and group.membership.needs("d3")


def test_a_machine_whose_state_is_part_of_no_copy_is_not_needed() -> None:
    """Its successor may come only when it goes."""
    group = Group(replicas=2, each=2, restore_step=4)
    group.start("a0", "b1", "c2", "d3")
    group.lose("b1")
    group.lose("d3")
    group.membership.drain("c2")
    group.join("c2", step=7, in_step=True, last=commit(6), built=0, rank=0, generation=1)
    assert group.membership.needs("c2"), "a0 has not said what it holds"
    group.join("e4")
    assert not group.membership.needs("e4"), "it holds nothing"
    group.join("a0", step=7, in_step=True, last=commit(6), built=0, rank=0, generation=1)
    assert not group.membership.needs("c2")


def test_a_machine_that_will_go_is_left_after_a_step_with_nothing_repeated() -> None:
    group = Group(replicas=2, start=3)
    group.start("a0", "b1", "c2")
    group.membership.drain("b1")
    effects = group.advance()
    assert effects.called == "drain"
    assert signals(effects) == {"a0": "boundary", "b1": "boundary"}
    assert [replica.workers for replica in effects.formed] == [("c2",)], "its successor"
    group.join("b1", step=5, last=commit(4, boundary=True))
    effects = group.join("a0", step=5, last=commit(4, boundary=True))
    assert layout(effects) == {0: ("a0",)} and "b1" not in effects.answers
    assert effects.regrouped is not None and effects.regrouped.outcome == "boundary"
    effects = group.lose("b1")
    assert effects.called is None
    assert signals(group.build("c2")) == {"a0": "boundary"}
    effects = group.join("a0", step=6, last=commit(5, boundary=True))
    assert layout(effects) == {0: ("a0",), 1: ("c2",)}


def test_one_that_leaves_hands_on_the_commit_that_it_alone_has_seen() -> None:
    group = Group(replicas=3, start=3)
    group.start("a0", "b1", "c2")
    group.lose("c2")
    group.membership.drain("a0")
    group.join("b1", step=6, in_step=True)
    effects = group.join("a0", step=7, last=commit(6))
    assert layout(effects) == {1: ("b1",)}
    run = run_of(effects, "b1")
    assert (run.step, run.commit, run.heals) == (7, commit(6), ())


def test_a_machine_that_cannot_be_done_without_is_used_until_it_goes() -> None:
    group = Group(replicas=2, least=2)
    group.start("a0", "b1")
    group.membership.drain("b1")
    assert group.advance().called is None


def test_the_only_replica_is_replaced_before_its_machine_goes() -> None:
    """The successor forms beside it, heals from it while it trains, and takes over after a step."""
    group = Group(replicas=1, start=2)
    group.start("a0", "b1")
    group.membership.drain("a0")
    effects = group.advance()
    assert [(r.index, r.workers) for r in effects.formed] == [(1, ("b1",))]
    assert effects.called is None, "it trains on"
    assert signals(group.build("b1")) == {"a0": "boundary"}
    effects = group.join("a0", step=5, last=commit(4, boundary=True))
    assert layout(effects) == {0: ("a0",), 1: ("b1",)}
    assert pairs(run_of(effects, "b1")) == {1: 0}
    assert effects.formed == [] and group.advance().called is None
    assert group.membership.caught_up("b1") is not None
    effects = group.advance()
    assert effects.called == "drain"
    group.join("b1", step=8, last=commit(7, boundary=True))
    effects = group.join("a0", step=8, last=commit(7, boundary=True))
    assert layout(effects) == {0: ("b1",)}, "with the number of the one that left"
    assert effects.regrouped is not None and effects.regrouped.outcome == "boundary"
    assert run_of(effects, "b1").replica == 0 and "a0" not in effects.answers
    assert group.lose("a0").called is None
    assert group.join("c2").formed == [], "there is room for one"


def test_no_fewer_than_the_least_train_while_one_is_replaced() -> None:
    group = Group(replicas=2, least=2, start=3)
    group.start("a0", "b1", "c2")
    group.membership.drain("a0")
    assert [replica.index for replica in group.advance().formed] == [2]
    assert signals(group.build("c2")) == {"a0": "boundary", "b1": "boundary"}
    group.join("a0", step=5, last=commit(4, boundary=True))
    group.join("b1", step=5, last=commit(4, boundary=True))
    # The machine goes before the successor has caught up: as in any loss, a step is repeated.
    assert group.lose("a0").called == "fault"
    group.join("c2", step=None)
    effects = group.join("b1", step=6, in_step=True, last=commit(5))
    assert layout(effects) == {1: ("b1",), 0: ("c2",)}
    assert pairs(run_of(effects, "c2")) == {1: 0}


def on_nodes(group: Group, **nodes: str) -> Group:
    """Says who is where: `m="c2 d3"`."""
    group.nodes = {worker: node for node, names in nodes.items() for worker in names.split()}
    return group


def boundary(group: Group, step: int, *workers: str) -> Effects:
    """They leave together after `step` - 1."""
    for worker in workers:
        effects = group.join(worker, step=step, last=commit(step - 1, boundary=True))
    return effects


def test_neighbours_on_a_node_are_put_together_before_those_in_rank() -> None:
    group = on_nodes(Group(replicas=2, each=2), k="a0 d3", m="b1 c2")
    for worker in ("a0", "b1", "c2"):
        group.join(worker)
    effects = group.join("d3")
    assert [replica.workers for replica in effects.formed] == [("a0", "d3"), ("b1", "c2")]


def test_a_tensor_group_is_not_split_while_enough_others_train() -> None:
    """The survivor on m and the spare on k wait for their like."""
    group = on_nodes(Group(replicas=2, each=2, start=5), n="a0 b1", m="c2 d3", k="e4 f5")
    group.start("a0", "b1", "c2", "d3", "e4")
    group.lose("d3")
    boundary(group, 5, "a0", "b1")
    assert group.join("c2", step=4, built=0).formed == []
    (formed,) = group.join("f5").formed
    assert formed.workers == ("e4", "f5")


def test_a_split_tensor_group_is_better_than_no_training() -> None:
    group = on_nodes(Group(replicas=1, each=2, start=3), m="a0 b1", k="c2")
    group.start("a0", "b1", "c2")
    group.lose("b1")
    (formed,) = group.join("a0", step=4, built=0).formed
    assert formed.workers == ("a0", "c2")


def test_where_no_node_holds_a_tensor_group_it_is_split() -> None:
    nodes = {"j": "a0", "k": "b1", "l": "c2", "m": "d3"}
    group = on_nodes(Group(replicas=2, each=2), **nodes)
    for worker in ("a0", "b1", "c2"):
        group.join(worker)
    effects = group.join("d3")
    assert [replica.workers for replica in effects.formed] == [("a0", "b1"), ("c2", "d3")]


def test_in_two_levels_a_node_has_the_workers_that_the_layout_says() -> None:
    """Shards of a node are not neighbours; the single worker on l is passed over."""
    dims = ParallelDims(shard=4, nodes=2)
    nodes = {"k": "a0 b1", "l": "c2", "m": "d3 e4"}
    group = on_nodes(Group(replicas=1, dims=dims, start=5), **nodes)
    for worker in ("a0", "b1", "c2", "d3"):
        assert group.join(worker).formed == []
    (formed,) = group.join("e4").formed
    assert formed.workers == ("a0", "d3", "b1", "e4")


def test_a_context_group_is_not_split_where_nodes_have_room_for_whole_ones() -> None:
    """Else it is: nobody waits for its like."""
    dims = ParallelDims(shard=2, others=(("context", 2),))
    nodes = {"k": "a0 b1 c2", "l": "d3", "m": "e4 f5"}
    group = on_nodes(Group(replicas=2, dims=dims, start=6), **nodes)
    for worker in ("a0", "b1", "c2", "d3", "e4"):
        assert group.join(worker).formed == []
    (formed,) = group.join("f5").formed
    assert formed.workers == ("a0", "b1", "e4", "f5")
    group.nodes |= {"g6": "n", "h7": "o"}
    assert group.join("g6").formed == []
    (formed,) = group.join("h7").formed
    assert formed.workers == ("c2", "d3", "g6", "h7")


def straddling_group() -> Group:
    """Replica 0 is whole on n, replica 1 on two nodes, since its like on m is lost."""
    nodes = {"n": "a0 b1", "m": "c2", "k": "e4", "l": "f5 g6", "o": "h7 i8"}
    group = on_nodes(Group(replicas=2, each=2, least=2, start=4), **nodes)
    group.start("a0", "b1", "c2", "e4")
    return group


def test_a_straddling_replica_moves_when_a_whole_seat_is_free() -> None:
    """One forms on a node beside it and gets the state; then it leaves, at a boundary, with nothing
    repeated, and its workers are spares."""
    group = straddling_group()
    assert group.join("f5").formed == []
    (formed,) = group.join("g6").formed
    assert (formed.index, formed.workers) == (2, ("f5", "g6"))
    effects = group.build("f5", "g6")
    assert (effects.called, len(effects.signals)) == ("grow", 4)
    effects = boundary(group, 5, "a0", "b1", "c2", "e4")
    assert layout(effects) == {0: ("a0", "b1"), 1: ("c2", "e4"), 2: ("f5", "g6")}
    assert run_of(effects, "f5").heals == ((2, 0, (0, 1)),) and group.advance().called is None
    group.membership.caught_up("f5")
    assert group.advance().called is None
    group.membership.caught_up("g6")
    effects = group.advance()
    assert effects.called == "move" and set(signals(effects).values()) == {"boundary"}
    effects = boundary(group, 8, "a0", "b1", "c2", "e4", "f5", "g6")
    assert layout(effects) == {0: ("a0", "b1"), 1: ("f5", "g6")}
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.lost_steps) == ("boundary", 0)
    assert effects.formed == [] and group.membership.places.idle == {"c2", "e4"}
    assert group.advance() == Effects()


def test_there_is_one_successor_for_each_straddling_replica() -> None:
    group = straddling_group()
    for worker in ("f5", "g6", "h7"):
        group.join(worker)
    assert group.join("i8").formed == []
    assert group.membership.places.whole == 3
    assert [replica.workers for replica in group.lose("f5").formed] == [("h7", "i8")]


def test_of_two_straddling_replicas_the_one_on_more_nodes_is_left() -> None:
    nodes = {"k": "a0 b1", "l": "c2", "m": "d3", "n": "e4", "o": "f5", "p": "g6 h7 i8"}
    dims = ParallelDims(shard=3)
    group = on_nodes(Group(replicas=2, dims=dims, least=2, start=6), **nodes)
    here, successor = ("a0", "b1", "c2", "d3", "e4", "f5"), ("g6", "h7", "i8")
    group.start(*here)
    for worker in successor:
        group.join(worker)
    group.build(*successor)
    boundary(group, 5, *here)
    for worker in successor:
        group.membership.caught_up(worker)
    assert group.advance().called == "move"
    effects = boundary(group, 8, *here, *successor)
    assert layout(effects) == {0: ("a0", "b1", "c2"), 1: successor}


def test_a_straddling_replica_stays_where_another_one_is_lost() -> None:
    """Its successor takes the place of that one."""
    group = straddling_group()
    group.join("f5")
    group.join("g6")
    group.build("f5", "g6")
    boundary(group, 5, "a0", "b1", "c2", "e4")
    group.membership.caught_up("f5")
    group.membership.caught_up("g6")
    assert group.advance().called == "move"
    group.lose("a0")
    for worker in ("c2", "e4", "f5"):
        group.join(worker, step=6, in_step=True, last=commit(5))
    effects = group.join("g6", step=6, in_step=True, last=commit(5))
    assert layout(effects) == {1: ("c2", "e4"), 0: ("f5", "g6")}


def test_one_that_has_left_and_is_still_there_is_gone_back_to_rather_than_a_checkpoint() -> None:
    group = Group(replicas=2, start=2)
    group.start("a0", "b1")
    group.membership.drain("a0")
    assert group.advance().called == "drain"
    group.join("a0", step=5, last=commit(4, boundary=True))
    assert layout(group.join("b1", step=5, last=commit(4, boundary=True))) == {1: ("b1",)}
    group.join("c2")
    group.build("c2")
    assert kept(group.lose("b1")) == {"a0": True}
    effects = group.join("a0", step=5, last=commit(4, boundary=True))
    assert effects.regrouped is not None
    assert (effects.regrouped.outcome, effects.regrouped.lost_steps) == ("boundary", 0)
    assert layout(effects) == {0: ("c2",), 1: ("a0",)}
    assert pairs(run_of(effects, "c2")) == {1: 0}


def test_a_worker_that_is_told_to_end_does_so_once_it_has_no_slot() -> None:
    group = Group(replicas=2, start=2)
    group.start("a0", "b1")
    group.membership.drain("b1", dismiss=True)
    assert group.advance().called == "drain"
    group.join("b1", step=5, last=commit(4, boundary=True))
    effects = group.join("a0", step=5, last=commit(4, boundary=True))
    assert layout(effects) == {0: ("a0",)}
    assert effects.answers["b1"] == Stop(error=None)
    assert group.advance().answers == {}, "it is told once"
    assert group.join("b1").answers == {"b1": Stop(error=None)}, "the first answer was lost"
    assert group.lose("b1").called is None
    group.join("c1")
    group.membership.drain("c1", dismiss=True)
    assert group.advance().answers == {}, "it builds"
    assert group.join("c1").answers == {"c1": Stop(error=None)}


def test_a_worker_that_is_told_to_end_stays_while_its_state_may_be_of_the_last_copy() -> None:
    """It ended where it came before the other holder: a checkpoint was gone back to."""
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.membership.drain("d3", dismiss=True)
    group.advance()
    group.lose("b1")
    group.lose("c2")
    effects = group.join("d3", step=3, in_step=True, last=commit(2), rank=1)
    assert effects.answers == {} and group.membership.needs("d3")
    assert kept(group.join("a0", step=3, in_step=True, last=commit(2), rank=0)) == {
        "a0": True, "d3": True,
    }  # fmt: skip


def test_a_worker_on_a_machine_that_will_go_gets_no_slot() -> None:
    group = Group(replicas=2, start=1)
    group.start("a0")
    group.membership.drain("b1")
    assert group.join("b1").formed == []


def test_a_worker_that_leaves_by_itself_calls_the_others() -> None:
    group = Group(replicas=2)
    group.start("a0", "b1")
    effects = group.join("a0", step=3, in_step=True)
    assert effects.called == "fault" and signals(effects) == {"b1": "fault"}
    effects = group.join("b1", step=3, in_step=True)
    assert effects.regrouped is not None and effects.regrouped.outcome == "repeat"


def test_records_of_an_older_roster_are_missed_only_where_the_newest_goes_on_from_them() -> None:
    """A worker that alone saw a commit may come only when a roster has stood without it."""
    group = Group(replicas=2)
    group.start("a0", "b1")
    group.membership.progress.record(4)
    group.join("a0", step=6, last=commit(5))
    assert not group.membership.progress.awaits(4, 1) and group.membership.progress.awaits(5, 1)
    effects = group.join("b1", step=5, in_step=True, last=commit(4))
    assert effects.regrouped is not None and effects.regrouped.step == 6
    awaits = group.membership.progress.awaits
    assert awaits(5, 1) and not awaits(6, 1) and awaits(5, 2) and awaits(6, 2)
    group.membership.progress.record(3)
    assert not awaits(5, 1), "there is a gap before it"
    group.membership.progress.since = 2
    assert not awaits(4, 1), "the run went back after it"


def test_a_fault_overrules_a_boundary() -> None:
    group = Group(replicas=3, start=2)
    group.start("a0", "b1")
    group.join("c2")
    assert signals(group.build("c2")) == {"a0": "boundary", "b1": "boundary"}
    effects = group.lose("b1")
    assert effects.signals == {"a0": Signal(serial=2, kind="fault")}
    effects = group.join("a0", step=3, in_step=True)
    assert layout(effects).keys() == {0, 2}
    assert run_of(effects, "a0").serial == 2, "both calls are settled"


# -- the end ---------------------------------------------------------------------------------------


def test_the_run_is_over_when_all_are_done_and_the_checkpoint_stands() -> None:
    group = Group(replicas=2, start=3)
    group.start("a0", "b1", "c2")
    assert group.join("a0", step=STEPS, finished=True) == Effects()
    assert group.join("b1", step=STEPS, finished=True) == Effects()
    effects = group.checkpointed(STEPS)
    assert effects.answers == dict.fromkeys(("a0", "b1", "c2"), Stop(error=None))
    assert group.join("d0").answers == {"d0": Stop(error=None)}, "a late one"


def test_when_the_saving_replica_dies_at_the_end_another_one_is_asked_to_finish() -> None:
    group = Group(replicas=2)
    group.start("a0", "b1")
    group.join("b1", step=STEPS, finished=True, last=commit(STEPS - 1))
    effects = group.lose("a0")
    run = run_of(effects, "b1")
    assert (run.position, run.step, run.restore, run.lead) == (0, STEPS, False, True)
    group.checkpointed(STEPS)
    effects = group.join("b1", step=STEPS, finished=True)
    assert effects.answers == {"b1": Stop(error=None)}


def test_a_replica_that_is_done_is_not_called_to_a_boundary() -> None:
    group = Group(replicas=3, start=2)
    group.start("a0", "b1")
    group.join("a0", step=STEPS, finished=True)
    group.join("c2")
    assert group.build("c2").called is None


def test_a_finished_worker_that_is_formed_anew_is_not_called_away_from_it() -> None:
    group = Group(replicas=1, each=2, start=3)
    group.start("a0", "b1", "c2")
    group.join("a0", step=STEPS, finished=True)
    effects = group.lose("b1")
    assert effects.formed[0].workers == ("a0", "c2")
    assert effects.signals == {}, "a call would break the formation that it has just been given"


@pytest.mark.parametrize("error", [None, "user code failed"])
def test_at_the_end_nobody_is_left_waiting_for_one_that_is_gone(error: str | None) -> None:
    group = Group(replicas=2, each=1, start=1)
    group.start("a0")
    group.join("b1")
    group.membership.stopped = Stop(error=error)
    effects = group.join("c2")
    assert effects.answers == {"c2": Stop(error=error)}
    assert signals(effects) == {"a0": "fault", "b1": "fault"}
    assert group.membership.replica_broken("b1"), "not its own fault"


@pytest.mark.parametrize(("step", "keep"), [(14, True), (15, False)])
def test_a_survivor_of_the_roster_before_completes_the_copy_while_its_state_is_current(
    step: int, keep: bool
) -> None:
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.lose("b1")
    for worker in ("a0", "c2", "d3"):
        effects = group.join(worker, step=14, in_step=True, generation=1)
    assert layout(effects) == {1: ("c2", "d3")} and run_of(effects, "a0").follows
    group.lose("c2")
    group.join("a0", step=14, built=0)
    effects = group.join("d3", step=step, in_step=True, rank=1, built=0)
    assert kept(effects) == {"a0": keep, "d3": keep}


# -- what the coordinator asks ---------------------------------------------------------------------


def test_names_of_slots_and_who_is_awaited() -> None:
    group = Group(replicas=2, each=2, start=5)
    group.start("a0", "b1", "c2", "d3", "e4")
    assert group.membership.slot_name("d3") == "replica 1 shard 0 tensor 1"
    assert group.membership.slot_name("e4") is None
    group.lose("b1")
    group.join("c2", step=1, in_step=True)
    assert group.membership.calls.unfollowed.keys() == {"a0", "d3"}
    assert not group.membership.replica_broken("c2")
    assert group.membership.replica_broken("a0")


def test_signals_go_on_after_the_newest_that_a_worker_has_heard() -> None:
    """Of a coordinator that is lost. It passes by whatever has a lower number."""
    calls = Calls()
    calls.resume([standing("a0", 1, serial=4)])
    assert calls.sign("a0", "fault", broken=False).serial == 5


def test_who_followed_a_call_is_no_laggard_of_it_when_called_again() -> None:
    group = Group(replicas=3, start=3)
    group.start("a0", "b1", "c2")
    first = group.lose("c2").signals
    assert group.membership.calls.laggards(first) == ["a0", "b1"]
    group.join("a0", step=1, in_step=True)
    assert group.membership.calls.laggards(first) == ["b1"]
    group.join("b1", step=1, in_step=True)
    assert group.membership.calls.laggards(first) == []
    group.join("d3")
    second = group.build("d3").signals
    assert second.keys() == {"a0", "b1"}, "called again, for the new replica"
    assert group.membership.calls.laggards(first) == []
    assert group.membership.calls.laggards(second) == ["a0", "b1"]
    third = group.lose("b1").signals
    assert third.keys() == {"a0"}
    assert group.membership.calls.laggards(second) == ["a0"], (
        "the second call counts, not the third"
    )


def test_a_checkpoint_that_nobody_can_read_is_given_up_for_the_one_before() -> None:
    group = Group(replicas=2, each=2, restore_step=8)
    effects = group.start("a0", "b1", "c2", "d3")
    assert effects.regrouped is not None
    assert (effects.regrouped.step, effects.regrouped.outcome) == (8, "start")
    group.membership.progress.checkpoint_lost(newest=4, reason="damaged")
    assert group.join("a0").signals.keys() == {"b1", "c2", "d3"}, "it has no state"
    group.join("b1")
    group.join("c2")
    effects = group.join("d3")
    assert effects.regrouped is not None and not group.membership.stopped
    assert (effects.regrouped.step, effects.regrouped.outcome) == (4, "restore")
    assert effects.regrouped.lost_steps == 4 and group.membership.progress.recorded == 4
    assert {run.source for run in effects.answers.values()} == {"store"}  # type: ignore[union-attr]


@pytest.mark.parametrize("snapshot", [0, 5])
def test_never_from_the_seed_where_there_was_a_checkpoint(snapshot: int) -> None:
    group = Group(replicas=2, restore_step=8, snapshot_step=snapshot)
    group.start("a0", "b1")
    group.membership.progress.checkpoint_lost(newest=0, reason="the checkpoint of step 8: damaged")
    group.join("a0")
    effects = group.join("b1")
    if snapshot:
        assert effects.regrouped is not None and effects.regrouped.step == 5
        group.membership.progress.snapshotted(0)
        group.join("a0")
        effects = group.join("b1")
    stop = Stop(error="the checkpoint of step 8: damaged")
    assert effects.regrouped is None
    assert effects.answers == {"a0": stop, "b1": stop} and group.membership.stopped == stop


def test_a_group_across_replicas_that_fails_calls_all_away_once() -> None:
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.membership.cross_lost(0, "reset")
    assert signals(group.advance()) == {}, "of a roster that is no more"
    group.membership.cross_lost(1, "reset")
    assert signals(group.advance()) == dict.fromkeys(("a0", "b1", "c2", "d3"), "fault")
    group.membership.cross_lost(1, "reset")
    assert signals(group.advance()) == {}
    for worker in ("a0", "b1", "c2", "d3"):
        effects = group.join(worker, step=5, in_step=True)
    assert effects.regrouped is not None and effects.regrouped.outcome == "repeat"
    assert group.membership.call is None


def test_the_survivors_of_a_replica_that_breaks_after_a_call_are_told() -> None:
    """They may wait in it for the one that is lost, and on NCCL nothing else ends that."""
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    group.membership.cross_lost(1, "reset")
    assert not any(signal.broken for signal in group.advance().signals.values())
    assert group.lose("d3").signals == {"c2": Signal(serial=2, kind="fault", broken=True)}
    assert group.advance().signals == {}


def fail_together(group: Group, *workers: str, step: int) -> Effects:
    """The group across replicas fails in the middle of a step, with nobody lost."""
    group.membership.cross_lost(group.membership.roster.generation, "connection reset")
    group.advance()
    for worker in workers:
        effects = group.join(worker, step=step, in_step=True)
    return effects


def test_regroups_in_a_row_with_neither_a_step_nor_a_loss_end_the_run() -> None:
    group = Group(replicas=2)
    group.start("a0", "b1")
    for pause_s in (0.0, FIRST_PAUSE_S):
        effects = fail_together(group, "a0", "b1", step=5)
        assert {run_of(effects, worker).pause_s for worker in ("a0", "b1")} == {pause_s}
    effects = fail_together(group, "a0", "b1", step=5)
    assert effects.regrouped is None
    stop = group.membership.stopped
    assert stop is not None and effects.answers == {"a0": stop, "b1": stop}
    assert stop.error is not None and stop.error.startswith(
        "3 regroups in a row at step 5, with no progress and no worker lost "
        "(health.max_regroups_without_progress = 3): collectives across replicas fail while all "
        "workers live. The last failure: connection reset."
    )


@pytest.mark.parametrize("between", ["a step", "a loss"])
def test_a_step_or_a_loss_in_between_begins_the_row_anew(between: str) -> None:
    group, step = Group(replicas=2), 5
    group.start("a0", "b1")
    for number in range(3 * IN_VAIN):
        effects = fail_together(group, "a0", "b1", step=step)
        assert run_of(effects, "a0").pause_s <= FIRST_PAUSE_S
        if between == "a step":
            step += 1
        elif number % 2:
            group.join(f"s{number}")
            group.lose(f"s{number}")


def grow(group: Group, newcomer: str, *workers: str, step: int) -> None:
    """A newcomer enters at a boundary."""
    group.join(newcomer)
    assert group.build(newcomer).called == "grow"
    for worker in workers:
        effects = group.join(worker, step=step)
    assert effects.regrouped is not None and effects.regrouped.step == step


def fail_with_a_newcomer(group: Group, newcomer: str, *workers: str, step: int) -> float:
    """As `fail_together`, with a newcomer that has no state yet. Returns the pause."""
    fail_together(group, *workers, step=step)
    return run_of(group.join(newcomer), workers[0]).pause_s


def test_steps_before_a_planned_regroup_begin_the_row_anew() -> None:
    """A new group of a run that grows now and then fails once, right at its start, each time."""
    group, step = Group(replicas=3, start=2), 5
    group.start("a0", "b1")
    for number in range(2, 3 + IN_VAIN):
        newcomer = f"s{number}"
        grow(group, newcomer, "a0", "b1", step=step)
        assert fail_with_a_newcomer(group, newcomer, "a0", "b1", step=step) == 0.0
        for reason in ("heal", "drain"):
            if reason == "heal":
                group.membership.caught_up(newcomer)
            else:
                group.membership.drain(newcomer)
            assert group.advance().called == reason
            step += 1
            for worker in ("a0", "b1", newcomer):
                group.join(worker, step=step)
    assert group.membership.stopped is None


def test_steps_that_are_given_up_begin_the_row_anew_too() -> None:
    """The run goes back to one checkpoint again and again, and commits steps in between."""
    progress = Progress(restore_step=10)
    for _ in range(2 * IN_VAIN):
        progress.record(14)
        progress.interrupted(10)
        assert progress.in_vain == 1
        progress.begin(10, back=True)


def test_a_loss_before_a_planned_regroup_begins_the_row_anew() -> None:
    group = Group(replicas=3, start=2)
    group.start("a0", "b1")
    for _ in range(IN_VAIN - 1):
        effects = fail_together(group, "a0", "b1", step=5)
    assert run_of(effects, "a0").pause_s == FIRST_PAUSE_S
    group.join("s9")
    group.lose("s9")
    grow(group, "c2", "a0", "b1", step=5)
    assert fail_with_a_newcomer(group, "c2", "a0", "b1", step=5) == 0.0


def test_the_regroup_that_a_loss_explains_is_not_one_of_the_row() -> None:
    group = Group(replicas=2)
    group.start("a0", "b1")
    group.join("s9")
    group.lose("s9")
    for _ in range(IN_VAIN):
        fail_together(group, "a0", "b1", step=5)
    assert group.membership.stopped is None
    fail_together(group, "a0", "b1", step=5)
    assert group.membership.stopped is not None


def test_no_replica_gets_the_number_of_one_that_stands_and_is_in_no_record() -> None:
    """It was taken for one with state, and the one that stood was lost from sight."""
    group = Group(replicas=2)
    group.membership.resume(
        [standing("a0", 5, built=True, proven=True)],
        generation=3, restored=1, formations=4, recorded=5, began=5,
    )  # fmt: skip
    assert [replica.formed for replica in group.join("b1").formed] == [6]


def test_a_run_of_which_only_the_first_roster_stood_does_not_begin_anew() -> None:
    """And one that was written off under the coordinator before is no member."""
    group = Group(replicas=2, start=2)
    lone = standing("a0", 0, generation=0)
    group.membership.resume(
        [lone], generation=1, restored=1, formations=2, recorded=5, began=0, lost={"b1"}
    )
    assert group.membership.call is None
    answer = group.join("b1").answers["b1"]
    assert isinstance(answer, Stop) and answer.error is not None and "written off" in answer.error


# -- an answer that is lost on its way -------------------------------------------------------------


def test_one_that_never_heard_what_to_build_is_told_anew() -> None:
    """It waited in `join` for ever, and the run went on without its replica."""
    group = Group(replicas=2, start=1)
    group.start("a0")
    assert [replica.workers for replica in group.join("b1").formed] == [("b1",)]
    effects = group.join("b1", built=0)
    assert isinstance(effects.answers["b1"], Build) and effects.answers["b1"].formed == 3
    assert group.build("b1").called == "grow"


def test_peers_of_one_that_never_heard_what_to_build_are_called_from_where_they_wait() -> None:
    group = Group(replicas=2, each=2, start=2)
    group.start("a0", "b1")
    group.join("c2")
    assert [replica.workers for replica in group.join("d3").formed] == [("c2", "d3")]
    assert signals(group.join("c2", built=0)) == {"d3": "fault"}
    assert [replica.workers for replica in group.join("d3", built=0).formed] == [("c2", "d3")]


def test_one_that_never_heard_of_its_roster_lets_its_replica_go() -> None:
    """Its peer waits for it in a collective of the replica, which no call reaches."""
    group = Group(replicas=2, each=2)
    group.start("a0", "b1", "c2", "d3")
    effects = group.join("a0", generation=0)
    assert effects.answers == {"a0": Leave()}
    assert effects.signals["b1"].broken and not effects.signals["c2"].broken
    assert effects.called == "fault"


def test_one_that_never_heard_of_the_last_roster_is_not_taken_for_done() -> None:
    group = Group(replicas=2)
    group.start("a0", "b1")
    group.membership.cross_lost(1, "a connection was reset")
    for worker in ("a0", "b1"):  # and the last state is in no checkpoint
        effects = group.join(worker, step=STEPS, finished=True)
    assert run_of(effects, "a0").generation == 2
    effects = group.join("a0", step=STEPS, finished=True, generation=1)
    assert signals(effects) == {"b1": "fault"}, "it waits where groups are made"


def test_news_of_a_heal_counts_once_and_the_last_of_a_replica_completes_it() -> None:
    """A worker tells it again where no answer has come."""
    group = with_a_newcomer()
    told = [group.membership.caught_up(worker) for worker in ("a0", "e4", "e4", "f5", "f5")]
    assert told == [None, None, None, group.membership.roster.replicas[1], None]


def test_a_heal_that_failed_is_counted_once_in_a_roster() -> None:
    """All workers of the newcomer lose their source at once."""
    heals = with_a_newcomer().membership.heals
    assert [heals.failed(worker) for worker in ("a0", "e4", "e4", "f5")] == [0, 1, 0, 1]


# -- every order of events -------------------------------------------------------------------------

BATCHES, BATCH = 25, 200
SOAK_BATCH = 1000


def play_all(seeds: range) -> list[World]:
    """Plays schedules, among which each kind of harm and of end must be."""
    worlds = [play(seed) for seed in seeds]
    outcomes = Counter(outcome for world in worlds for outcome in world.outcomes)
    assert set(outcomes) == {"start", "repeat", "finish_step", "boundary", "restore"}
    for harm in ("kills", "write_offs", "flakes"):
        assert any(getattr(w, harm) < getattr(w.plan, harm) for w in worlds), f"no {harm}"
    assert any(w.dismissed for w in worlds) and any(w.moves for w in worlds)
    return worlds


@pytest.mark.parametrize("batch", range(BATCHES))
def test_any_order_of_events_ends_well(batch: int) -> None:
    play_all(range(batch * BATCH, (batch + 1) * BATCH))


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(100))
def test_any_of_a_hundred_thousand_orders_ends_well(batch: int) -> None:
    first = BATCHES * BATCH + batch * SOAK_BATCH
    play_all(range(first, first + SOAK_BATCH))


TWO_BY_TWO = Plan(
    seed=0,
    max_replicas=2,
    min_replicas=1,
    workers_per_replica=2,
    start_workers=4,
    further_workers=0,
    node_workers=2,
    lanes=2,
    collectives=4,
    steps=2,
    save_every=None,
    memory_every=None,
    kills=0,
    write_offs=0,
    flakes=12,
    retreats=0,
    damages=0,
    drains=0,
    crashes=0,
    mishearings=0,
    silent=False,
    by_priority=False,
)
"""Nothing happens but that collectives fail."""


def test_collectives_that_fail_on_one_side_in_two_columns_leave_nobody_waiting() -> None:
    """The peer in each column waits for one that waits inside its replica for the peer in the
    other: without `Membership.cross_lost` it came to that in ten of these."""
    for seed in range(400):
        World(replace(TWO_BY_TWO, seed=seed)).play()


def test_these_schedules_read_saved_states_and_fail_to() -> None:
    worlds = [play(seed) for seed in range(BATCH, 4 * BATCH)]
    assert any(w.checkpoints_failed for w in worlds)
    assert any(w.snapshots_read for w in worlds) and any(w.snapshots_failed for w in worlds)
    assert any(w.taken_back for w in worlds), "of a coordinator that was cut off"


def test_these_schedules_go_back() -> None:
    worlds = [play(seed) for seed in range(BATCH)]
    assert sum(world.went_back for world in worlds) > BATCH // 20


def test_the_last_copies_go_with_the_last_replica_that_stays() -> None:
    group = Group(replicas=2, least=2)
    group.start("a0", "b1")
    group.membership.drain("b1")
    assert not group.membership.last_copies_go
    group.membership.drain("a0")
    assert group.membership.last_copies_go


def test_a_newcomer_without_state_is_no_copy() -> None:
    group = Group(replicas=2)
    group.start("a0", "b1")
    group.lose("b1")
    group.join("a0", step=5, in_step=True)
    group.join("c2")
    group.build("c2")
    group.join("a0", step=7)
    group.membership.drain("a0")
    assert group.membership.heals.behind
    assert group.membership.last_copies_go
