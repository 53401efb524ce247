"""What the soak draws can happen, and a seed's faults are what they were."""

from __future__ import annotations

from typing import get_args

from benchmarks._chaos import (
    LAYOUTS,
    NOTICE_S,
    ON_NETWORK,
    ROOM_FOR_ALL,
    STEPS,
    ActionKind,
    draw_schedule,
    parse_layouts,
)
from elastic.coordinator.fault_injection import TOGETHER_S
from elastic.protocol.faults import RECOVERY_PHASES, check_faults, parse_faults
from health.progress import SOON

SEEDS = range(300)


def test_every_schedule_can_be_run() -> None:
    for seed in SEEDS:
        schedule = draw_schedule(seed, resize=True)
        layout = schedule.layout
        check_faults(schedule.faults, steps=STEPS, slots=layout.slots)
        assert parse_faults(",".join(map(str, schedule.faults))) == schedule.faults
        assert 1 <= schedule.min_replicas <= layout.replicas
        assert not (schedule.evaluation_s and any(a.paused for a in schedule.actions))
        assert layout.slots + schedule.spares <= ROOM_FOR_ALL
        assert sum(schedule.homes) == layout.slots
        if schedule.machines is not None:
            assert sum(schedule.machines) >= schedule.min_replicas * layout.workers
            assert schedule.machines[1:] in ((), (layout.workers,))
        else:
            kinds = {action.kind for action in schedule.actions}
            assert kinds.isdisjoint(set(ON_NETWORK) | {"machine"}) or schedule.hosts
            assert kinds.isdisjoint({"add", "remove", "drain"})


def test_everything_is_drawn() -> None:
    schedules = [draw_schedule(seed, resize=True) for seed in SEEDS]
    plain = [draw_schedule(seed, resize=True, plain=True) for seed in SEEDS]
    assert {str(s.layout) for s in plain} == set(map(str, LAYOUTS))
    assert {s.layout.workers for s in schedules} == {1, 2, 4}
    assert {f.kind for s in schedules for f in s.faults} == {"kill", "freeze", "raise"}
    actions = {a.kind for s in schedules for a in s.actions}
    assert actions == set(get_args(ActionKind))
    assert any(s.evaluation_s for s in schedules)
    phases = {f.phase for s in schedules for f in s.faults}
    assert {"heal_source", "heal_target", "build", "checkpoint", "shutdown"} <= phases
    assert any(f.spare for s in schedules for f in s.faults)


def test_faults_come_alone_in_twos_and_in_recoveries() -> None:
    plans = [draw_schedule(seed, resize=True, plain=True).faults for seed in range(50)]
    assert len(set(plans)) > 40
    drawn = [fault for plan in plans for fault in plan]
    assert {len(fault.workers) for fault in drawn} == {0, 1, 2}  # a spare has no number
    assert any(fault.phase in RECOVERY_PHASES for fault in drawn)


def test_who_waits_for_the_soak_is_not_taken_for_one_that_hangs() -> None:
    """Seed 17 is paused until a machine has joined, which took 5 s. In seed 10 a fault waits for
    another worker, whose replica is gone."""
    for seed in SEEDS:
        schedule = draw_schedule(seed, resize=True)
        together = any(len(fault.workers) > 1 for fault in schedule.faults)
        waits_s = TOGETHER_S if together else 0.0
        if any(action.paused for action in schedule.actions):
            waits_s = NOTICE_S
        assert SOON * (schedule.health.progress_timeout_s or 0.0) > waits_s


def test_the_same_seed_draws_the_same() -> None:
    assert all(draw_schedule(s, resize=True) == draw_schedule(s, resize=True) for s in SEEDS)


def test_a_stored_seed_draws_what_it_drew() -> None:
    """Before there were features."""
    assert str(draw_schedule(46, resize=True, plain=True)) == (
        "seed 46: 2x1x1 spares 1 min 1 saves 10/5 patience 0.2 s | "
        "freeze@12.reduce:0,freeze@38.before_commit:1,kill@40.shutdown:0 | "
        "add@15,coordinator@20 | plain"
    )


def test_features_change_no_fault() -> None:
    """One hits the same replicas, and as many workers of each."""
    for seed in SEEDS:
        plain = draw_schedule(seed, resize=True, plain=True)
        schedule = draw_schedule(seed, resize=True)
        assert (schedule.actions, schedule.hosts) == (plain.actions, plain.hosts)
        for fault, before in zip(schedule.faults, plain.faults, strict=True):
            assert (fault.kind, fault.step, fault.phase) == (before.kind, before.step, before.phase)
            assert len(set(fault.workers)) == len(before.workers)
            assert [slot // schedule.layout.workers for slot in fault.workers] == [
                slot // plain.layout.workers for slot in before.workers
            ]


def test_layouts_that_are_asked_for_are_those_of_the_runs() -> None:
    layouts = parse_layouts("2x1x1x2,1x4x1")
    assert layouts is not None
    drawn = {draw_schedule(seed, layouts, resize=True).layout for seed in SEEDS}
    assert drawn == set(layouts)
    assert [layout.workers for layout in layouts] == [2, 4]
