from __future__ import annotations

import pickle
import pickletools
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from elastic.protocol import messages
from elastic.protocol.causes import HANG
from elastic.protocol.events import StepRecord
from elastic.protocol.messages import (
    Build,
    Death,
    Evidence,
    Helper,
    Identity,
    Leave,
    LinkTest,
    Order,
    Recorded,
    Report,
    Run,
    Signal,
    Standing,
    Stop,
    shows_recent,
)
from elastic.protocol.roster import Heal
from health.reading import Reading
from trainer.replication.step_commit import Commit

COMMIT = Commit(
    step=4, loss=2.5, grad_norm=float("inf"), tokens=64, digests=bytes(16), boundary=True
)
RECORD = StepRecord(
    step=4, loss=2.5, grad_norm=1.0, lr=1e-3, tokens=64, time=1.0, generation=2, replicas=2,
    sample_digests=[2**40 - 1, 0],
)  # fmt: skip
IDENTITY = Identity(worker="w0-abc", rank=0, node="f00", pid=42)
EVIDENCE = Evidence(
    stacks="in loop", readings=(Reading(kind="gpu", of="0", at_s=1.0, values={"lost": 0.0}),)
)
ORDER = Order(
    generation=2, lanes=((0, 2), (1,), ()), step=5, commit=COMMIT, heals=(Heal(2, 0, (1, 2)),),
    followers=(0, 0, 1), restore=False, source="store", recorded=4, until=9, skips=(), pause_s=0.5,
    meet=("h", 1),
)  # fmt: skip
BUILD = Build(
    formed=3, replica=1, rank=2, step=5, keep=True, kept="whole", meet=("h", 1), serial=4
)  # fmt: skip
ALL = [
    IDENTITY,
    Helper(name="uploader", pid=42, born_ticks=7),
    Report(identity=IDENTITY),
    Report(
        identity=IDENTITY, built=3, step=5, in_step=True, last=COMMIT, finished=True,
        recent=(RECORD,),
    ),
    LinkTest(generation=2, short={1: 64}, of_bytes=1000, bound_s=10.0),
    Standing(identity=IDENTITY, formed=3, generation=2, lanes=(0, 2), replicas=2, source=1),
    Leave(),
    BUILD,
    Run(
        generation=2, replica=1, rank=0, position=3, formed=3, lanes=((0, 2), (1,), ()), step=5,
        commit=COMMIT, heals=(Heal(2, 0, (1, 2)),), followers=(0, 0, 1), restore=False,
        source="store", recorded=4, until=9, skips=(), pause_s=0.5, meet=("h", 1), serial=9,
        build=BUILD,
    ),
    ORDER,
    Death(worker="w0-abc", cause=HANG, detail="stopped", evidence=EVIDENCE),
    EVIDENCE,
    Stop(error=None),
    Stop(error="user code failed"),
    Signal(serial=1, kind="boundary"),
    Recorded(steps=5, save_wanted=False),
    Death(worker="w0-abc", cause=HANG, detail="stopped by a signal"),
]  # fmt: skip


@pytest.mark.parametrize("message", ALL, ids=lambda m: type(m).__name__)
def test_a_message_crosses_ray_as_it_is(message: Any) -> None:
    assert pickle.loads(pickle.dumps(message)) == message


@pytest.mark.parametrize("message", ALL, ids=lambda m: type(m).__name__)
def test_a_message_is_plain_data(message: Any) -> None:
    strings = [arg for _, arg, _ in pickletools.genops(pickle.dumps(message, protocol=4))]
    modules = {arg for arg in strings if isinstance(arg, str) and arg.split(".")[0] == "torch"}
    assert modules == set(), "reading it would import torch"
    with pytest.raises(FrozenInstanceError):
        setattr(message, fields(message)[0].name if fields(message) else "any", None)


def test_every_message_is_tried() -> None:
    here = messages.__name__
    defined = {c for c in vars(messages).values() if isinstance(c, type) and c.__module__ == here}
    assert {type(message) for message in ALL} == defined


def test_a_worker_that_has_nothing_says_so() -> None:
    report = Report(identity=IDENTITY)
    assert (report.built, report.step, report.in_step, report.finished) == (0, None, False, False)


def test_where_a_worker_stands_follows_from_the_answers_to_it() -> None:
    building = Standing(identity=IDENTITY).after(BUILD)
    assert (building.formed, building.rank, building.generation, building.kept) == (3, 2, 0, True)
    assert not building.built
    built = building.joining(Report(identity=IDENTITY, built=3))
    assert built.built and built.joining(Report(identity=IDENTITY)) == Standing(identity=IDENTITY)
    run = ORDER.part(replica=1, rank=2, position=2, formed=3, serial=5)
    seated = replace(built, serial=4).after(run)
    assert (seated.formed, seated.generation, seated.replicas, seated.kept) == (3, 2, 3, False)
    assert seated.built
    assert (seated.source, seated.behind, seated.proven) == (0, True, False)
    whole = built.after(ORDER.part(replica=1, rank=0, position=2, formed=3, serial=5))
    assert (whole.source, whole.behind) == (0, False), "its peers heal"
    assert seated.after(Stop(error=None)) == seated
    assert seated.after(Leave()) == Standing(identity=IDENTITY)


def test_a_step_that_only_one_of_a_replica_knows_is_shown_once_the_replica_is_replaced() -> None:
    """It had joined as one of a whole replica, for which another one was to speak, and that was
    lost: the steps would be in no record."""
    first, second = (
        ORDER.part(replica=1, rank=n, position=1, formed=3, serial=1) for n in range(2)
    )
    assert shows_recent(first, built=3) and not shows_recent(second, built=3)
    assert shows_recent(second, built=0), "its replica is no more"
    assert shows_recent(None, built=4), "it has built its part of the one that replaces it"


def test_a_follower_stands_as_one_of_a_replica_that_is_not_whole() -> None:
    run = ORDER.part(replica=1, rank=2, position=3, formed=7, serial=5)
    assert run.follows and run.lanes_of(2) == [(0, 2), (1,), (), ()] and not run.lacks_state
    follows = Standing(identity=IDENTITY).after(run)
    assert (follows.formed, follows.rank, follows.generation, follows.lanes) == (7, 2, 2, ())
