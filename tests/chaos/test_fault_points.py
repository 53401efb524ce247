"""Every fault point, every kind, every layout: the run ends as if nothing had happened.

A worker takes seconds to start and a step milliseconds, so one run takes many faults. They stand
`APART` steps from each other, the samples wait for the run to be whole (tests/support/paced.py),
and `min_replicas` is `max_replicas`: so each fault finds its slot taken by a worker with state.

Checked of each run: it ends; every fault fired, and its worker was lost for the right cause, and no
other; the weights, losses and samples are those of one undisturbed replica (I1, I2, I5); the
replicas are equal (I3); its last checkpoint is whole (I4, it is read); nobody went back to a saved
state while the living held a copy, or stood still for longer than it takes to find a fault (I6);
nothing is left behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._chaos import HEALTH, LANES, LAYOUTS, Layout, parse_layout
from benchmarks._chaos_left import find_left_behind
from benchmarks._chaos_losses import find_unexplained_losses, find_wrong_causes
from benchmarks._chaos_restores import find_needless_restores
from benchmarks._chaos_run import read_all_steps
from benchmarks._chaos_stalls import find_long_stalls
from checkpointing import CheckpointConfig
from elastic import ParallelConfig
from elastic.protocol.events import FaultFired, RegroupDone, SnapshotTaken
from elastic.protocol.faults import parse_faults
from elastic.reporting.event_log import read_events
from tests.support.paced import paced_task
from tests.support.tiny import Outcome, fit, tiny_task, tiny_train, tiny_trainer
from tests.support.watching import check_replicas_equal

EVERY = (*LAYOUTS, *map(parse_layout, ("2x1x1x2", "2x4x1")))
"""Also a ring, and two levels."""
APART, FIRST = 6, 8
KINDS = ("kill", "freeze", "raise")
SOAK = pytest.mark.soak
# The longest run of four workers takes 190 s on two cores that do nothing else; eight take longer.
pytestmark = pytest.mark.timeout(1200)

Undisturbed = Callable[[Layout, int], Outcome]


@pytest.fixture(scope="module")
def undisturbed(cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The outcome of one replica of the layout's degrees when nothing happens."""
    storage = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def run(replica: Layout, steps: int) -> Outcome:
        name = f"{replica}-{steps}"
        return fit(
            tiny_trainer(text, storage, name=name, replicas=1, steps=steps, **settings_of(replica))
        )

    return lambda layout, steps: run(replace(layout, replicas=1), steps)


def settings_of(layout: Layout) -> dict[str, Any]:
    """What the trainer is asked for: of four shards two levels, and samples for each of them in a
    lane."""
    return {
        "parallel": ParallelConfig(
            shard=layout.shard,
            context=layout.context,
            tensor=layout.tensor,
            workers_per_node=layout.workers // 2 if layout.shard == 4 else None,
        ),
        "lanes": LANES,
        "global_batch": LANES * max(2, layout.shard),
    }


class Broken:
    """A run with faults, held against the undisturbed one."""

    def __init__(
        self,
        undisturbed: Undisturbed,
        text: Path,
        storage: Path,
        layout: Layout,
        faults: Sequence[str],
        *,
        steps: int,
        spares: int = 2,
        save_every: int | None = None,
        memory_every: int | None = None,
    ) -> None:
        self.faults = parse_faults(",".join(faults))
        self.outcome = fit(
            tiny_trainer(
                text,
                storage,
                train=tiny_train(
                    text,
                    task=paced_task(
                        tiny_task(text), storage, "run", layout.replicas, patience_s=0.25
                    ),
                    steps=steps,
                    eval_every=2,
                    prefetch=0,  # samples pace the steps
                    **settings_of(layout),
                ),
                replicas=layout.replicas,
                min_replicas=layout.replicas,
                spares=spares,
                faults=",".join(faults),
                checkpoint=CheckpointConfig(
                    every_steps=save_every,
                    memory_every=1 if layout.replicas == 1 else memory_every,
                ),
                health=HEALTH,
            )
        )
        self.events = read_events(storage / "run" / "events.jsonl")
        self.restored = [
            e.step for e in self.events if isinstance(e, RegroupDone) and e.outcome == "restore"
        ]
        self._check(undisturbed(layout, steps), storage / "run", layout)

    def _check(self, whole: Outcome, root: Path, layout: Layout) -> None:
        slots = layout.slots
        fired = sorted(e.fault for e in self.events if isinstance(e, FaultFired))
        hits = [str(f) for f in self.faults for _ in f.targets(slots) or (0,)]
        assert fired == sorted(hits)
        assert find_wrong_causes(self.events, self.faults) == []
        assert find_unexplained_losses(self.events) == []
        assert self.outcome.report["outcome"] == "finished"
        check_replicas_equal(self.outcome.report, root)
        assert self.outcome.samples == whole.samples
        assert self.outcome.losses == whole.losses
        assert self.outcome.params == whole.params
        steps = read_all_steps(root / "steps.jsonl")
        assert find_needless_restores(self.events, steps, layout.workers) == []
        assert find_long_stalls(self.events, steps, HEALTH, least_workers=slots) == []
        assert find_left_behind(root) == []


@pytest.fixture
def break_run(undisturbed: Undisturbed, text: Path, tmp_path: Path) -> Callable[..., Broken]:
    return functools.partial(Broken, undisturbed, text, tmp_path)


def at_each_point(layout: Layout, phases: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """One fault for each phase and kind; the slots take turns."""
    points = [(phase, kind) for phase in phases for kind in kinds]
    return [
        f"{kind}@{FIRST + i * APART}.{phase}:{i % layout.slots}"
        for i, (phase, kind) in enumerate(points)
    ]


def in_each_recovery(layout: Layout, phases: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """A worker of the last replica is killed, and then the recovery is hit: in the replica that
    gives the state, or, elsewhere, in the one that takes the place."""
    faults = []
    for i, (phase, kind) in enumerate((phase, kind) for phase in phases for kind in kinds):
        step, last = FIRST + i * APART, layout.slots - 1
        slot = i % layout.workers if phase == "heal_source" else last - i % layout.workers
        faults += [f"kill@{step}:{last}", f"{kind}@{step}.{phase}:{slot}"]
    return faults


def all_hit(together: str) -> list[str]:
    """The same slots are hit at once, by one kind after the other."""
    return [f"{kind}@{FIRST + i * APART}:{together}" for i, kind in enumerate(KINDS)]


def steps_for(points: int) -> int:
    return FIRST + points * APART


COMPUTE = ("data", "forward", "backward", "reduce")
COMMIT = ("before_commit", "in_commit", "after_commit", "optimizer")
ALL = [pytest.param(layout, id=str(layout), marks=SOAK) for layout in EVERY]
SEVERAL = [param for param, layout in zip(ALL, EVERY, strict=True) if layout.replicas > 1]


def test_one_of_each_kind(break_run: Callable[..., Broken]) -> None:
    faults = [
        f"raise@{FIRST}.before_commit:0",
        f"freeze@{FIRST + APART}.in_commit:1",
        f"kill@{FIRST + 2 * APART}.after_commit:0",
    ]
    run = break_run(parse_layout("2x1x1"), faults, steps=steps_for(3))
    assert run.outcome.report["lost_steps"] == 0


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("phases", [COMPUTE, COMMIT], ids=["compute", "commit"])
def test_in_a_step(break_run: Callable[..., Broken], layout: Layout, phases: Sequence[str]) -> None:
    points = len(phases) * len(KINDS)
    faults = at_each_point(layout, phases, KINDS)
    run = break_run(layout, faults, steps=steps_for(points))
    if layout.replicas > 1:
        assert run.outcome.report["lost_steps"] == 0
    else:
        assert len(run.restored) == points, "one replica loses its state each time"
        assert min(run.restored) > 0, "and has a snapshot"


@pytest.mark.parametrize("layout", ALL)
def test_while_a_replica_forms(break_run: Callable[..., Broken], layout: Layout) -> None:
    faults = in_each_recovery(layout, ("build", "regroup"), KINDS)
    run = break_run(layout, faults, steps=steps_for(2 * len(KINDS)))
    if layout.replicas > 1:
        assert run.outcome.report["lost_steps"] == 0


@pytest.mark.parametrize("layout", SEVERAL)
def test_while_a_replica_heals(break_run: Callable[..., Broken], layout: Layout) -> None:
    """Where the giver was the last whole replica, all is lost with it; `Broken` checks that it is
    lost only then."""
    faults = in_each_recovery(layout, ("heal_target", "heal_source"), KINDS)
    run = break_run(layout, faults, steps=steps_for(2 * len(KINDS)))
    if layout.replicas == 3:
        assert run.outcome.report["lost_steps"] == 0


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize(("phase", "end"), [("checkpoint", "kill"), ("evaluation", "freeze")])
def test_between_steps(
    break_run: Callable[..., Broken], layout: Layout, phase: str, end: str
) -> None:
    """While a checkpoint is taken, in an evaluation, and at the very end."""
    steps = steps_for(len(KINDS))
    faults = [*at_each_point(layout, (phase,), KINDS), f"{end}@{steps}.shutdown:{layout.slots - 1}"]
    run = break_run(layout, faults, steps=steps, save_every=2)
    if layout.replicas > 1:
        assert run.outcome.report["lost_steps"] == 0
    else:
        assert min(run.restored) > 0


@pytest.mark.parametrize("layout", ALL)
def test_spares(break_run: Callable[..., Broken], layout: Layout) -> None:
    """A spare that is gone when it is needed costs time, and nothing else. At the very end a worker
    raises."""
    steps = steps_for(2)
    faults = [f"kill@{FIRST}:spare", f"freeze@{FIRST + 1}:spare", f"kill@{FIRST + APART}:0"]
    run = break_run(layout, [*faults, f"raise@{steps}.shutdown:0"], steps=steps)
    if layout.replicas > 1:
        assert run.outcome.report["lost_steps"] == 0
    else:
        assert len(run.restored) == 1 and run.restored[0] > 0


@SOAK
@pytest.mark.parametrize(
    ("layout", "together", "lost"),
    [
        ("2x2x1", "0+1", False),  # a whole replica
        ("2x2x1", "0+2", True),  # a shard, in both replicas
        ("2x2x1", "0+3", False),  # another shard in each: the survivors go on together
        ("2x2x1", "0+1+2", True),
        ("2x1x2", "0+3", False),  # another tensor rank in each
        ("2x1x2", "1+3", True),
        ("2x1x1", "0+1", True),  # everybody
        ("3x1x1", "0+1", False),
        ("3x1x1", "1+2", False),
        ("1x2x1", "0+1", True),
    ],
)
def test_at_once(break_run: Callable[..., Broken], layout: str, together: str, lost: bool) -> None:
    run = break_run(parse_layout(layout), all_hit(together), steps=steps_for(len(KINDS)))
    assert len(run.restored) == (len(KINDS) if lost else 0)
    assert lost or run.outcome.report["lost_steps"] == 0


@SOAK
@pytest.mark.parametrize(
    ("layout", "together"), [("2x1x1", "0+1"), ("2x2x1", "0+2"), ("2x1x2", "1+3")]
)
def test_a_shard_is_lost_and_lies_in_memory(
    break_run: Callable[..., Broken], layout: str, together: str
) -> None:
    """The run goes on from the newest snapshot that there was, each time."""
    sizes, steps = parse_layout(layout), steps_for(len(KINDS))
    run = break_run(sizes, all_hit(together), steps=steps, memory_every=1)
    newest = [
        [s.step for s in run.events if isinstance(s, SnapshotTaken) and s.time <= e.time][-1]
        for e in run.events
        if isinstance(e, RegroupDone) and e.outcome == "restore"
    ]
    assert run.restored == newest
    assert len(newest) == len(KINDS) and min(newest) > 0


@SOAK
@pytest.mark.parametrize("layout", ["2x1x1", "1x2x1"])
def test_everybody_at_once_and_no_spare(break_run: Callable[..., Broken], layout: str) -> None:
    """For a while the run has no worker at all."""
    sizes = parse_layout(layout)
    everybody = "+".join(map(str, range(sizes.slots)))
    run = break_run(sizes, [f"kill@{FIRST}:{everybody}"], steps=steps_for(1), spares=0)
    assert len(run.restored) == 1


@SOAK
def test_sharded_and_tensor_parallel(break_run: Callable[..., Broken]) -> None:
    """A replica of both has more than one group inside: who waits in one hears of a peer's end in
    another only from its neighbours, as they leave."""
    phases = ("forward", "reduce")
    faults = [f"kill@{FIRST + i * APART}.{phase}:{3 + i}" for i, phase in enumerate(phases)]
    run = break_run(parse_layout("2x2x2"), faults, steps=steps_for(len(phases)))
    assert run.outcome.report["lost_steps"] == 0


@SOAK
def test_tensor_groups_in_two_levels(break_run: Callable[..., Broken]) -> None:
    """The smallest such replica has eight workers, and is alone here."""
    layout, phases = parse_layout("1x4x2"), ("forward", "reduce")
    faults = at_each_point(layout, phases, ("kill",))
    run = break_run(layout, faults, steps=steps_for(len(phases)))
    assert len(run.restored) == len(phases) and min(run.restored) > 0
