"""kill -9 of each process that has a part in a save on S3, at each of its requests to the store.

The store holds the request that the process is killed at, and afterwards carries it out ("done", as
where the answer is lost) or not ("lost"). At no time is there a checkpoint that cannot be read in
whole; the next save succeeds, and the next start of the run leaves nothing but checkpoints.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from checkpointing import (
    Keys,
    NotCommittedError,
    Reader,
    S3Config,
    Store,
    Surveyor,
    list_steps,
    load_manifest,
    open_store,
    pin,
    sweep_orphans,
    unpin,
    verify_checkpoint,
)
from checkpointing.retention.retire import sweep_uncommitted
from tests.support import save_roles
from tests.support.fakes.s3_faults import FaultServer, Rule
from tests.support.fakes.s3_server import BUCKET, faulty_s3_server, open_uploads
from tests.support.save_roles import (
    DEADLINE_S,
    LARGE,
    Role,
    begin_run,
    bring,
    new_publisher,
    publish,
    state,
    write,
)

KEYS = Keys()
OLD, NEW, LATER = 10, 20, 30  # and LARGE, between them
FATES = ("lost", "done")
BRIEF_FATES = (pytest.param("lost", marks=pytest.mark.soak), "done")
Start = Callable[..., Role]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with faulty_s3_server() as faults:
        yield faults


@pytest.fixture
def faults(server: FaultServer) -> Iterator[FaultServer]:
    yield server
    server.clear()


@pytest.fixture
def config(faults: FaultServer) -> S3Config:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/{save_roles.RUN}"
    return S3Config(url=url, endpoint_url=faults.url, part_bytes=5 << 20, timeout_s=20)


@pytest.fixture
def store(config: S3Config) -> Store:
    return open_store(config)


@pytest.fixture
def start() -> Iterator[Start]:
    roles: list[Role] = []

    def run(work: Callable[..., None], *args: Any) -> Role:
        roles.append(Role(work, *args))
        return roles[-1]

    yield run
    for role in roles:
        role.kill()


@pytest.fixture(scope="module")
def copies() -> Iterator[dict[int, Any]]:
    """Workers that hold the state of each step."""
    workers = {step: Role(save_roles.worker, step) for step in (OLD, NEW, LARGE, LATER)}
    yield {step: worker.hear() for step, worker in workers.items()}
    for worker in workers.values():
        worker.kill()


def kill_at(rule: Rule, role: Role, fate: str) -> None:
    """Kills `role` while the store holds its request, which is then lost or done."""
    assert rule.entered.wait(DEADLINE_S), "it never came to that request"
    role.kill()
    end(rule, fate)


def end(rule: Rule, fate: str = "done") -> None:
    """Lets the store go on with the request that it holds."""
    rule.over = fate == "lost"
    rule.gate.set()
    assert rule.left.wait(DEADLINE_S)


def check(store: Store, *steps: int) -> None:
    """Exactly the checkpoints of `steps` are there, and every byte of them is what was saved."""
    assert list_steps(store, KEYS) == list(steps)
    for step in steps:
        assert verify_checkpoint(store, KEYS, step).findings == ()
        reader = Reader(store, load_manifest(store, KEYS, step))
        for name, tensor in state(step).items():
            assert torch.equal(reader.read_full(name), tensor)


def check_nothing_else(store: Store, config: S3Config, *more: str) -> None:
    """There is nothing in the store but its checkpoints, and `more`."""
    records = [load_manifest(store, KEYS, step) for step in list_steps(store, KEYS)]
    wanted = {KEYS.commit(r.step) for r in records}.union(*(r.segments for r in records), more)
    assert set(store.list("")) == wanted
    assert open_uploads(config) == []


def save(config: S3Config, copies: dict[int, Any], step: int) -> None:
    assert publish(new_publisher(config), write(config, copies[step], step)) is not None


# -- the uploader, and the worker whose copy it writes ---------------------------------------------

REQUESTS = ("create", "part", "complete", "put")


@pytest.mark.parametrize(("request_", "fate"), itertools.product(REQUESTS, FATES))
def test_the_uploader(
    request_: Any,
    fate: str,
    config: S3Config,
    store: Store,
    faults: FaultServer,
    copies: dict[int, Any],
    start: Start,
    tmp_path: Path,
) -> None:
    save(config, copies, OLD)
    rule = faults.inject("delay", kind=request_, prefix=f"{config.prefix}d/")
    kill_at(rule, start(save_roles.uploader, config, copies[LARGE], LARGE), fate)
    check(store, OLD)
    save(config, copies, LARGE)  # by the uploader that takes its place
    check(store, LARGE)
    begin_run(config, tmp_path)
    check(store, LARGE)
    check_nothing_else(store, config)


def test_the_worker_after_the_copy(
    config: S3Config, store: Store, faults: FaultServer, copies: dict[int, Any], start: Start
) -> None:
    save(config, copies, OLD)
    rule = faults.inject("delay", kind="part")
    worker = start(save_roles.worker, LARGE)
    uploader = start(save_roles.uploader, config, worker.hear(), LARGE)
    kill_at(rule, worker, "done")
    assert publish(new_publisher(config), uploader.hear()) is not None
    check(store, LARGE)
    check_nothing_else(store, config)


def test_a_worker_before_the_copy(
    config: S3Config, store: Store, copies: dict[int, Any], start: Start
) -> None:
    """Two workers share the writing; one of them has nothing to hand over."""
    save(config, copies, OLD)
    publisher = new_publisher(config)
    start(save_roles.worker, NEW).kill()
    assert publish(publisher, write(config, copies[NEW], NEW), writers=2) is None
    check(store, OLD)
    assert publish(publisher, write(config, copies[LATER], LATER)) is not None
    assert publisher.lost == {NEW: 1}
    check(store, LATER)
    check_nothing_else(store, config)


# -- the committer ---------------------------------------------------------------------------------

DEEDS: dict[str, tuple[str, str, str, tuple[int, ...]]] = {
    "before the manifest": ("list", "m/", "lost", (OLD,)),
    "manifest lost": ("put", KEYS.commit(NEW), "lost", (OLD,)),
    "manifest done": ("put", KEYS.commit(NEW), "done", (OLD, NEW)),
    "claim lost": ("put", KEYS.claim(OLD), "lost", (OLD, NEW)),
    "claim done": ("put", KEYS.claim(OLD), "done", (OLD, NEW)),
    "record's deletion lost": ("delete", KEYS.commit(OLD), "lost", (OLD, NEW)),
    "record's deletion done": ("delete", KEYS.commit(OLD), "done", (NEW,)),
    "note's deletion lost": ("delete", KEYS.verified(OLD), "lost", (NEW,)),
    "data's deletion lost": ("delete_many", "", "lost", (NEW,)),
    "data's deletion done": ("delete_many", "", "done", (NEW,)),
    "claim's deletion lost": ("delete", KEYS.claim(OLD), "lost", (NEW,)),
    "claim's deletion done": ("delete", KEYS.claim(OLD), "done", (NEW,)),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_the_committer(
    deed: str,
    config: S3Config,
    store: Store,
    faults: FaultServer,
    copies: dict[int, Any],
    start: Start,
    tmp_path: Path,
) -> None:
    kind, key, fate, left = DEEDS[deed]
    save(config, copies, OLD)
    receipt = write(config, copies[NEW], NEW)
    prefix = config.prefix + key if key else ""
    rule = faults.inject("delay", kind=kind, prefix=prefix)
    kill_at(rule, start(save_roles.committer, config, receipt), fate)
    check(store, *left)
    publish(new_publisher(config), receipt)  # the worker hands it in again
    check(store, NEW)
    save(config, copies, LATER)
    check(store, LATER)
    begin_run(config, tmp_path)
    check(store, LATER)
    check_nothing_else(store, config)


# -- the driver, as the run starts again -----------------------------------------------------------

UNREADABLE = f"{KEYS.commit(NEW)}.unreadable"
STARTS = (
    ("put", "probe-"),
    ("delete", "probe-"),
    ("abort", "d/"),
    ("put", UNREADABLE),
    ("delete", KEYS.commit(NEW)),
    ("delete_many", ""),
)


@pytest.mark.parametrize("fate", BRIEF_FATES)
@pytest.mark.parametrize("deed", STARTS, ids="-".join)
def test_the_driver(
    deed: tuple[str, str],
    fate: str,
    config: S3Config,
    store: Store,
    faults: FaultServer,
    copies: dict[int, Any],
    start: Start,
    tmp_path: Path,
) -> None:
    """There are an open upload, a record that cannot be read, and segments without one."""
    save(config, copies, OLD)
    orphans = write(config, copies[LATER], LATER).segments
    client = boto3.client("s3", endpoint_url=config.endpoint_url)
    client.create_multipart_upload(Bucket=BUCKET, Key=config.prefix + orphans[0].key)
    store.put(KEYS.commit(NEW), [b"{"])
    kind, key = deed
    prefix = config.prefix + key if key else ""
    rule = faults.inject("delay", kind=kind, prefix=prefix)
    kill_at(rule, start(save_roles.driver, config, tmp_path), fate)
    if KEYS.commit(NEW) not in store.list(KEYS.commits):
        check(store, OLD)
    begun = begin_run(config, tmp_path)
    assert begun is not None and begun.step == OLD
    check(store, OLD)
    check_nothing_else(store, config, UNREADABLE)
    save(config, copies, LATER)
    check(store, LATER)


# -- an import, which no lock keeps from a run -----------------------------------------------------

IMPORTS = (
    ("put", KEYS.claim(NEW)),
    ("put", "d/"),
    ("put", KEYS.commit(NEW)),
    ("delete", KEYS.claim(NEW)),
)


@pytest.mark.parametrize("fate", BRIEF_FATES)
@pytest.mark.parametrize("deed", IMPORTS, ids="-".join)
def test_the_importer(
    deed: tuple[str, str],
    fate: str,
    config: S3Config,
    store: Store,
    faults: FaultServer,
    copies: dict[int, Any],
    start: Start,
) -> None:
    save(config, copies, OLD)
    kind, key = deed
    rule = faults.inject("delay", kind=kind, prefix=config.prefix + key)
    kill_at(rule, start(save_roles.importer, config, NEW), fate)
    committed = kind == "delete" or (key == KEYS.commit(NEW) and fate == "done")
    check(store, *([OLD, NEW] if committed else [OLD]))
    unpin(store, KEYS, NEW)  # what the error of the next one says
    if not committed:
        bring(config, NEW)
    check(store, OLD, NEW)
    store.abort_unfinished()
    sweep_orphans(Surveyor(store=store, keys=KEYS), GENERATION_AFTER)
    check_nothing_else(store, config)


GENERATION_AFTER = save_roles.GENERATION + 1


@pytest.mark.parametrize("at", ["d/", KEYS.commit(NEW)])
def test_a_run_beside_an_import(
    at: str,
    config: S3Config,
    store: Store,
    faults: FaultServer,
    copies: dict[int, Any],
    start: Start,
    tmp_path: Path,
) -> None:
    """It starts and retires while the last segment, or the record, is under way."""
    save(config, copies, OLD)
    rule = faults.inject("delay", kind="put", prefix=config.prefix + at)
    importer = start(save_roles.importer, config, NEW)
    assert rule.entered.wait(DEADLINE_S)
    begin_run(config, tmp_path)
    save(config, copies, LATER)
    check(store, LATER)
    with pytest.raises(
        NotCommittedError, match=r"it is being imported; .*`unpin` it and import it"
    ):
        bring(config, NEW)
    with pytest.raises(NotCommittedError, match="there is no m/"):
        pin(store, KEYS, NEW)
    end(rule)
    assert importer.hear() == "done"
    check(store, NEW, LATER)


def test_an_import_whose_claim_was_taken_away_commits_nothing(
    config: S3Config,
    store: Store,
    faults: FaultServer,
    copies: dict[int, Any],
    start: Start,
    tmp_path: Path,
) -> None:
    save(config, copies, OLD)
    rule = faults.inject("delay", kind="put", prefix=f"{config.prefix}d/")
    importer = start(save_roles.importer, config, NEW)
    assert rule.entered.wait(DEADLINE_S)
    assert unpin(store, KEYS, NEW)
    begin_run(config, tmp_path)
    end(rule)
    assert "NotCommittedError: step 20 is not committed: the import lost its claim" in (
        importer.hear()
    )
    check(store, OLD)


def test_what_a_killed_import_has_left_goes_after_a_day(config: S3Config, store: Store) -> None:
    """Its claim keeps it for that long."""
    for step in (NEW, LATER):
        bring(config, step)
    store.delete(KEYS.commit(NEW))
    for until, goes in ((time.time(), False), (time.time() - 7200, True)):
        claim = {"claim": "importing", "by": "somebody", "until": until}
        store.put(KEYS.claim(NEW), [json.dumps(claim).encode()])
        assert bool(sweep_orphans(Surveyor(store=store, keys=KEYS), 0)) is False
        assert bool(sweep_uncommitted(Surveyor(store=store, keys=KEYS), LATER)) is goes
    check_nothing_else(store, config)
