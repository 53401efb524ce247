"""Which checkpoints in its store a run goes on from."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    Manifest,
    Snapshot,
    StorePlace,
    Surveyor,
    TensorSlice,
    delete_checkpoint,
    is_damage,
    list_steps,
    load_manifest,
    open_store,
    pin,
    retire,
    set_aside,
    verify_checkpoint,
)
from checkpointing.stores.kinds import place_of
from checkpointing.stores.local import LocalStore
from elastic.driver.resume import (
    Origin,
    add_snapshot,
    check_found,
    find_stored,
    remove_orphans,
    set_others_aside,
    skips_of,
    warn_of_older,
)
from elastic.protocol.events import CheckpointCommitted, Event, RegroupDone, RunStarted, WentBack
from elastic.protocol.run_identity import (
    RunIdentity,
    check_model,
    check_own,
    identify,
    newest_own,
    record_identity,
)
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import EventLog, read_events
from elastic.worker.restoring import open_checkpoint, open_own
from tests.support.sealed import seal, unsealed
from tests.support.tiny_checkpoint import KEYS, NUMBERS, write_state
from trainer.errors import ConfigError
from trainer.loop.samples import Skip
from trainer.progress import listening

ROSTER = RegroupDone(
    time=2, generation=3, step=2, replicas=2, lanes={}, renumbered={}, outcome="restore",
    lost_steps=9, repeated_steps=0,
)  # fmt: skip
WEIGHT, WIDER = torch.ones(4, 3), torch.ones(4, 5)


def state(weight: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    moments = {f"{kind}/w": torch.zeros_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
    return {"param/w": weight, **moments, **more}


def find(paths: RunPaths, identity: RunIdentity, model: Any = None) -> Origin:
    """With its records, and nothing in the nodes' memory."""
    return find_stored(paths, read_events(paths.events), identity, model)


def only(stored: Manifest | None) -> Origin:
    """This checkpoint, of a run without records."""
    return Origin(stored=stored, snapshot=None, passed=None)


def table(tensors: dict[str, torch.Tensor]) -> Any:
    return {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}


def save(
    paths: RunPaths,
    step: int,
    run: str | None,
    weight: torch.Tensor = WEIGHT,
    generation: int = 0,
    skips: Sequence[Sequence[int]] = (),
) -> None:
    marks: dict[str, Any] = {**NUMBERS, "skips": skips}
    if run is not None:
        marks["run"] = {"name": f"run {run}", "id": run}
    store = open_store(paths.checkpoints)
    write_state(store, state(weight), step=step, generation=generation, state=marks)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path / "run")


def test_an_identity_stays_also_where_the_directory_is_renamed(paths: RunPaths) -> None:
    made = identify(paths)
    assert made != identify(paths), "a start that is refused binds nothing"
    record_identity(paths, made)
    assert made == identify(paths) and made.origins == ()
    moved = RunPaths(root=paths.root.with_name("other"))
    paths.root.rename(moved.root)
    assert identify(moved) == made
    assert identify(paths) != made


def test_a_copy_of_checkpoints_is_a_fork(paths: RunPaths) -> None:
    save(paths, 2, "a")
    save(paths, 4, "b")
    save(paths, 6, None)
    forked = RunPaths(root=paths.root.with_name("fork"))
    shutil.copytree(paths.root / "checkpoints", forked.root / "checkpoints")
    identity = identify(forked)
    assert identity.origins == ("a", "b") and identity.id not in ("a", "b")
    for step in (2, 4, 6):
        check_own(load_manifest(open_store(forked.checkpoints), KEYS, step), identity, None)


def test_another_runs_checkpoint_is_passed_over(paths: RunPaths) -> None:
    identity = identify(paths)
    save(paths, 2, identity.id)
    save(paths, 4, None)
    save(paths, 6, "stranger")
    found, passed = newest_own(paths, identity)
    assert found is not None and found.step == 4, "an imported one is anybody's"
    assert isinstance(passed, CorruptError)
    key, mine = KEYS.commit(6), identity.id
    assert str(passed).startswith(f"{key}: run: it was written by run 'run stranger' with id ")
    assert mine in str(passed)
    set_others_aside(paths, only(found), identity, None)
    assert open_store(paths.checkpoints).list("m/")[-1] == f"{key}.foreign", "nothing is lost"


def test_a_checkpoint_that_lacks_a_number_is_passed_over(paths: RunPaths) -> None:
    """A start that took it would have workers that all refuse it."""
    identity = identify(paths)
    save(paths, 2, identity.id)
    write_state(open_store(paths.checkpoints), state(WEIGHT), step=4, state={"optimizer_steps": 3})
    found, passed = newest_own(paths, identity)
    assert found is not None and found.step == 2
    assert "no numbers under optimizer_steps and skipped_in_a_row, but [3, None]" in str(passed)


def test_another_models_checkpoint_is_passed_over(paths: RunPaths) -> None:
    identity = identify(paths)
    save(paths, 2, identity.id)
    save(paths, 4, identity.id, WIDER)
    found, passed = newest_own(paths, identity, table(state(WEIGHT)))
    assert found is not None and found.step == 2
    assert isinstance(passed, IncompatibleError) and passed.count == 3
    for name in ("exp_avg/w", "exp_avg_sq/w", "param/w"):
        assert f"'{name}': float32 [4, 5]" in str(passed)
    assert "float32 [4, 3] in the model" in str(passed) and "step 4" in str(passed)


def test_what_a_start_sets_aside(paths: RunPaths) -> None:
    """Sound records of others wherever they stand, and damaged ones that are in the way."""
    identity, store = identify(paths), open_store(paths.checkpoints)
    for step in (2, 8, 12, 18):
        save(paths, step, identity.id)
    for step in (4, 14):
        save(paths, step, "stranger")
    for step in (6, 16):
        save(paths, step, identity.id, WIDER)
    for step, record in ((8, b"{"), (10, b'{"schema": 9}'), (18, b'{"sch'), (20, b'{"schema": 9}')):
        store.put(KEYS.commit(step), [record])
    later = unsealed(store.get(KEYS.commit(16)))  # sealed, with what this version does not know
    later["tensors"][0][1][1] = "float99"
    store.put(KEYS.commit(22), [seal(later)])
    model = table(state(WEIGHT))
    found, _ = newest_own(paths, identity, model)
    assert found is not None and found.step == 12
    set_others_aside(paths, only(found), identity, model)
    foreign = {KEYS.commit(step) + ".foreign" for step in (4, 6, 10, 14, 16, 20, 22)}
    left = {KEYS.commit(step) for step in (2, 8, 12)}
    assert set(store.list("m/")) == {*left, *foreign, f"{KEYS.commit(18)}.unreadable"}
    set_others_aside(paths, only(found), identity, model)
    assert len(store.list("m/")) == 11, "once is enough"


def test_a_start_reads_each_record_once_and_says_so(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `keep_every` there are thousands, and on S3 each is a request: several at once."""
    identity, store, read = identify(paths), open_store(paths.checkpoints), Counter[str]()
    steps, told, get = range(2, 14, 2), list[str](), LocalStore.get
    both = threading.Barrier(2, timeout=10.0)
    for step in steps:
        save(paths, step, identity.id)
    left = KEYS.segment(rank=0, step=6, generation=0, attempt=9, index=0)
    store.put(left, [b"."])
    found, _ = newest_own(paths, identity)

    def count(self: LocalStore, key: str) -> bytes:
        both.wait()
        read[key] += 1
        return get(self, key)

    monkeypatch.setattr(LocalStore, "get", count)
    with listening(lambda what, done, total: told.append(f"{what} {done} {total}")):
        remove_orphans(set_others_aside(paths, only(found), identity, None), 1)
    assert read == {KEYS.commit(step): 1 for step in steps}
    assert left not in store.list("d/") and list_steps(store, KEYS) == [*steps]
    assert told == [
        *(f"looking at the checkpoints that are there {number} 6" for number in range(6)),
        "looking for what killed writers have left 0 0",
        "removed 1 segments of checkpoints that were never committed 0 0",
    ]


def test_what_was_set_aside_survives_retention(paths: RunPaths) -> None:
    identity, store = identify(paths), open_store(paths.checkpoints)
    save(paths, 2, "stranger")
    save(paths, 4, identity.id)
    save(paths, 7, "stranger")
    found, _ = newest_own(paths, identity)
    set_others_aside(paths, only(found), identity, None)
    surveyor = Surveyor(store=store, keys=KEYS)
    for step in (6, 8, 10):
        save(paths, step, identity.id)
        retire(surveyor, keep_last=1, keep_every=None, up_to_step=step)
        assert list_steps(store, KEYS) == [step]
    for step in (2, 7):
        store.put(KEYS.commit(step), [store.get(f"{KEYS.commit(step)}.foreign")])
        assert verify_checkpoint(store, KEYS, step, threads=1).findings == ()


def test_where_all_was_set_aside_the_run_does_not_begin_from_the_seed(paths: RunPaths) -> None:
    """As where it had gone on from a snapshot that is lost now."""
    identity = RunIdentity(id="mine")
    save(paths, 2, "stranger")
    set_others_aside(paths, only(None), identity, None)
    with pytest.raises(ConfigError, match=r"can be read; there are m/0+2\.json\.foreign"):
        check_found(paths, identity, "auto", find(paths, identity))


def test_where_all_are_of_a_later_version_the_error_says_so(paths: RunPaths) -> None:
    identity = identify(paths)
    save(paths, 4, identity.id)
    store = open_store(paths.checkpoints)
    later = unsealed(store.get(KEYS.commit(4)))
    later["tensors"][0][1][1] = "float99"
    store.put(KEYS.commit(4), [seal(later)])
    told = r"m/0+4\.json: a manifest of schema \d.* by a later .*Repair them, use the version that"
    with pytest.raises(ConfigError, match=told):
        check_found(paths, identity, "auto", find(paths, identity))


@pytest.mark.parametrize(
    ("run", "weight", "fact"),
    [("mine", WIDER, r"another model.*exp_avg/w.*\[4, 5\]"), ("stranger", WEIGHT, "run stranger")],
)
def test_with_nothing_else_to_go_on_from_the_run_does_not_begin(
    paths: RunPaths, run: str, weight: torch.Tensor, fact: str
) -> None:
    save(paths, 2, run, weight)
    identity = RunIdentity(id="mine")
    origin = find(paths, identity, table(state(WEIGHT)))
    assert origin.manifest is None
    with pytest.raises(ConfigError, match=rf"run_config\.name = 'run': .*{fact}") as raised:
        check_found(paths, identity, "auto", origin)
    said = str(raised.value)
    assert "resume='never'" in said and ".." not in said.replace("...", "")
    assert ("Use the same model" in said) == (weight is WIDER)
    assert ("copy its checkpoints to a directory of their own" in said) == (run == "stranger")
    assert "another checkpoint directory" not in said


@pytest.mark.parametrize(("run", "weight"), [("mine", WIDER), ("stranger", WEIGHT)])
def test_a_worker_refuses_it_as_it_would_a_damaged_one(
    paths: RunPaths, run: str, weight: torch.Tensor
) -> None:
    """So the coordinator sets it aside, and the next roster goes on from the one before."""
    save(paths, 2, "mine")
    save(paths, 4, run, weight)
    parts = {
        name: TensorSlice(name, tuple(t.shape), "float32", (0, 0), (2, 3))
        for name, t in state(WEIGHT).items()
    }
    job: Any = SimpleNamespace(paths=paths, identity=RunIdentity(id="mine"))
    engine: Any = SimpleNamespace(state=SimpleNamespace(slices=lambda: parts))
    reader, _ = open_own(job, engine, open_checkpoint, 2, "node")
    assert reader.manifest.step == 2
    with pytest.raises(CheckpointError) as raised:
        open_own(job, engine, open_checkpoint, 4, "node")
    assert is_damage(raised.value)


def test_moments_of_what_is_frozen_now_do_not_count(paths: RunPaths) -> None:
    """As where all of an imported model was trained, or none: they were made for everything."""
    trained = {f"{kind}/v": WEIGHT for kind in ("param", "exp_avg", "exp_avg_sq")}
    write_state(open_store(paths.checkpoints), state(WEIGHT, **trained), step=2)
    manifest = load_manifest(open_store(paths.checkpoints), KEYS, 2)
    frozen = table({"param/w": WEIGHT, **trained})
    check_model(manifest, frozen)
    with pytest.raises(IncompatibleError, match="absent in the model"):
        check_model(manifest, {})
    more = {**frozen, **table({"param/u": WEIGHT})}
    with pytest.raises(IncompatibleError, match=r"'param/u': absent in .*, float32 \[4, 3\] in"):
        check_model(manifest, more)


@pytest.mark.parametrize("moments", [(), ("momentum",), ("exp_avg",)])
def test_another_optimizers_state_is_no_state(paths: RunPaths, moments: tuple[str, ...]) -> None:
    save(paths, 2, None)
    manifest = load_manifest(open_store(paths.checkpoints), KEYS, 2)
    now = table({f"{kind}/w": WEIGHT for kind in ("param", *moments)})
    with pytest.raises(IncompatibleError, match=r"'exp_avg_sq/w': float32 .* absent"):
        check_model(manifest, now)


def test_what_was_frozen_then_cannot_be_trained_now(paths: RunPaths) -> None:
    write_state(open_store(paths.checkpoints), {"param/w": WEIGHT}, step=2)
    manifest = load_manifest(open_store(paths.checkpoints), KEYS, 2)
    with pytest.raises(IncompatibleError, match=r"'exp_avg/w': absent .* \(2 tensors differ\)"):
        check_model(manifest, table(state(WEIGHT)))


def test_what_the_run_went_back_for_is_not_gone_on_from(paths: RunPaths) -> None:
    """Whoever had to set it aside was gone before."""
    identity = identify(paths)
    save(paths, 2, identity.id)
    save(paths, 4, identity.id, generation=3)
    save(paths, 6, None)
    save(paths, 8, identity.id, generation=2)
    back = WentBack(time=1, step=2, before=9, reason="they differ", skip=[])

    def found(*happened: Event) -> int:
        with EventLog(paths.events) as log:
            for event in happened:
                log.append(event)
        origin = find(paths, identity)
        assert origin.stored is not None
        return origin.stored.step

    assert found() == 8
    assert found(back) == 6, "an imported one is none of it"
    delete_checkpoint(open_store(paths.checkpoints), KEYS, 6, force=True)
    assert found() == 2
    assert found(ROSTER) == 4, "it was made on the way from there"


@pytest.mark.parametrize(
    ("step", "run", "weight", "taken", "passed"),
    [
        (6, "mine", WEIGHT, True, None),
        (4, "mine", WEIGHT, False, None),
        (2, "mine", WEIGHT, False, None),
        (8, "mine", WEIGHT, False, None),  # the run went back before it
        (6, "stranger", WEIGHT, False, CorruptError),
        (6, "mine", WIDER, False, IncompatibleError),
    ],
)
def test_a_state_in_memory_is_taken_where_it_is_newer_and_the_runs_own(
    paths: RunPaths, step: int, run: str, weight: torch.Tensor, taken: bool, passed: Any
) -> None:
    identity, model = RunIdentity(id="mine"), table(state(WEIGHT))
    save(paths, 4, "mine")
    memory = RunPaths(root=paths.root.with_name("memory"))
    save(memory, step, run, weight)
    manifest = load_manifest(open_store(memory.checkpoints), KEYS, step)
    snapshot = Snapshot(manifest=manifest, places={})
    with EventLog(paths.events) as log:
        log.append(WentBack(time=1, step=7, before=9, reason="they differ", skip=[]))
    stored = find(paths, identity, model)
    origin = add_snapshot(stored, identity, snapshot, model)
    assert origin == replace(stored, snapshot=snapshot if taken else None, passed=origin.passed)
    assert type(origin.passed) is (passed or type(None))
    assert origin.manifest == (manifest if taken else stored.stored)
    assert add_snapshot(stored, identity, None, model) == stored


def test_what_the_run_went_back_for_goes_with_retention(paths: RunPaths) -> None:
    """It is the run's own: kept as a foreign one it would stay for ever."""
    identity = identify(paths)
    save(paths, 2, identity.id)
    save(paths, 4, identity.id, generation=3)
    save(paths, 6, None)  # imported meanwhile
    with EventLog(paths.events) as log:
        log.append(WentBack(time=1, step=2, before=9, reason="they differ", skip=[]))
    store = open_store(paths.checkpoints)
    origin = replace(find(paths, identity), stored=load_manifest(store, KEYS, 2))
    set_others_aside(paths, origin, identity, None)
    kept = [KEYS.commit(2), f"{KEYS.commit(4)}.unreadable", f"{KEYS.commit(6)}.foreign"]
    assert store.list("m/") == kept
    save(paths, 5, identity.id, generation=3)
    pin(store, KEYS, 5)
    set_others_aside(paths, origin, identity, None)
    assert store.list("m/") == sorted([*kept, KEYS.claim(5), f"{KEYS.commit(5)}.foreign"])


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_again(paths: RunPaths) -> None:
    """A store whose URL was changed looks like one that was never written to."""
    identity = identify(paths)
    with EventLog(paths.events) as log:
        log.append(CheckpointCommitted(time=0, step=6, generation=1, bytes=1, seconds=1))
    origin = find(paths, identity)
    with pytest.raises(ConfigError, match="a checkpoint of step 6 was committed"):
        check_found(paths, identity, "auto", origin)
    check_found(paths, identity, "never", origin)
    save(paths, 6, identity.id)
    check_found(paths, identity, "auto", find(paths, identity))


@pytest.mark.parametrize(("was", "is_now"), [("", "new"), ("old", ""), ("old", "new")])
def test_a_run_whose_store_was_changed_is_told_so(
    paths: RunPaths, tmp_path: Path, was: str, is_now: str
) -> None:
    def place(name: str) -> StorePlace | None:
        return place_of(tmp_path / name) if name else None

    before, after = replace(paths, store=place(was)), replace(paths, store=place(is_now))
    store = str(tmp_path / was) if was else ""
    started = RunStarted(
        time=0, name="run", layout={}, steps=9, start_step=0, versions={}, store=store
    )
    with EventLog(paths.events) as log:
        log.append(started)
        log.append(CheckpointCommitted(time=0, step=6, generation=1, bytes=1, seconds=1))
    identity = identify(before)
    with pytest.raises(ConfigError) as caught:
        check_found(after, identity, "auto", find(after, identity))
    error = caught.value
    assert (error.field, error.value) == (
        "checkpoint.store", str(tmp_path / is_now) if is_now else None
    )  # fmt: skip
    assert f"was committed to {store or 'the directory of the run'}, by " in error.fact
    assert error.fix.startswith("Set checkpoint.store as it was")
    save(after, 4, identity.id)  # some were brought, and not the newest
    with pytest.raises(ConfigError, match="and the newest is 4 in") as caught:
        check_found(after, identity, "auto", find(after, identity))
    assert caught.value.field == "checkpoint.store"
    save(before, 6, identity.id)
    check_found(before, identity, "auto", find(before, identity))


@pytest.mark.parametrize("is_now", ["", "new"])
def test_a_record_that_names_no_store_speaks_against_none(
    paths: RunPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_now: str
) -> None:
    """Of before 2026-11-26: the checkpoints may have gone to where they go now."""
    after = replace(paths, store=place_of(tmp_path / is_now) if is_now else None)
    started = RunStarted(time=0, name="run", layout={}, steps=9, start_step=0, versions={})
    line = started.to_json()
    del line["store"], line["store_settings"]
    paths.root.mkdir()
    paths.events.write_text(json.dumps(line) + "\n")
    with EventLog(paths.events) as log:
        log.append(CheckpointCommitted(time=0, step=6, generation=1, bytes=1, seconds=1))
    identity = identify(after)
    save(after, 4, identity.id)
    origin = find(after, identity)
    check_found(after, identity, "auto", origin)
    warn_of_older(after, origin)
    assert "tells of a checkpoint of step 6, and the newest state that is found is" in caplog.text


def test_a_start_far_back_is_told(paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    """Once: what it cannot take is no newer state to the next start."""
    identity = RunIdentity(id="mine")
    save(paths, 500, identity.id, generation=1)

    def told(*happened: Event) -> str:
        with EventLog(paths.events) as log:
            for event in happened:
                log.append(event)
        caplog.clear()
        origin = find(paths, identity)
        check_found(paths, identity, "auto", origin)
        assert caplog.text == "", "a start checks again when its data are prepared"
        warn_of_older(paths, origin)
        return caplog.text

    committed = CheckpointCommitted(time=0, step=500, generation=1, bytes=1, seconds=1)
    start = replace(ROSTER, generation=1, step=0, outcome="start")
    began = RunStarted(time=0, name="run", layout={}, steps=9, start_step=0, versions={})
    assert told(began, start, committed) == ""
    newer = replace(committed, step=5000, generation=2)
    said = told(replace(ROSTER, generation=2, step=500, outcome="repeat"), newer)
    assert "of step 5000" in said and "of step 500:" in said and str(paths.checkpoints) in said
    back = WentBack(time=2, step=500, before=5100, reason="they differ")
    assert told(back) == ""
    assert "of step 700," in told(
        replace(ROSTER, generation=3, step=500),
        replace(committed, step=700, generation=3),
        replace(newer, step=900),  # of the roster before: it came late
    )
    assert told(began, replace(start, generation=4, step=500)) == ""


def test_a_run_that_went_back_to_the_seed_begins_there_again(paths: RunPaths) -> None:
    """What it went back for was set aside, or is still to be, and nothing was saved since."""
    identity = RunIdentity(id="mine")
    store = open_store(paths.checkpoints)
    for step in (4, 6):
        save(paths, step, identity.id, generation=1)
    set_aside(store, KEYS, 4)
    back = WentBack(time=2, step=0, before=7, reason="they differ")
    with EventLog(paths.events) as log:
        for step in (4, 6):
            log.append(CheckpointCommitted(time=1, step=step, generation=1, bytes=1, seconds=1))
        with pytest.raises(ConfigError, match=r"there are m/0+4\.json\.unreadable; m/0+6\.json"):
            check_found(paths, identity, "auto", replace(find(paths, identity), stored=None))
        log.append(back)
        check_found(paths, identity, "auto", find(paths, identity))
        with pytest.raises(ConfigError, match="there is no checkpoint"):
            check_found(paths, identity, "must", find(paths, identity))
        log.append(replace(ROSTER, generation=2, step=0))
        log.append(CheckpointCommitted(time=3, step=2, generation=2, bytes=1, seconds=1))
        with pytest.raises(ConfigError, match="a checkpoint of step 2 was committed"):
            check_found(paths, identity, "auto", find(paths, identity))
        store.put(f"{KEYS.commit(6)}.unreadable", [b"damaged"])
        with pytest.raises(ConfigError, match=r"there are m/0+6\.json\.unreadable: .*\. Repair"):
            check_found(paths, identity, "auto", find(paths, identity))


def test_what_was_passed_over_is_known_to_a_state_from_before(paths: RunPaths) -> None:
    """The run ended before it had saved anything that tells of it."""
    identity = identify(paths)
    spoilt = WentBack(time=3, step=90, before=103, reason="a spike", skip=[100, 50])
    again = replace(spoilt, before=109)  # what came instead was spoilt, too

    def passed_over(*happened: Event) -> list[Skip]:
        with EventLog(paths.events) as log:
            for event in happened:
                log.append(event)
        return list(skips_of(find(paths, identity)))

    assert passed_over(replace(ROSTER, generation=3, outcome="start")) == []
    assert passed_over(spoilt) == [(100, 50)], "from the seed"
    save(paths, 90, identity.id, generation=3)
    assert passed_over() == [(100, 50)]
    roster = replace(ROSTER, generation=4, step=90)
    assert passed_over(roster, again, replace(spoilt, skip=[])) == [(100, 50), (100, 50)]
    save(paths, 101, identity.id, generation=5, skips=[[100, 50], [100, 50]])
    assert passed_over(replace(roster, generation=5)) == [(100, 50), (100, 50)], "as it was saved"
    later = replace(spoilt, step=101, before=120, skip=[118, 50])
    assert passed_over(later) == [(100, 50), (100, 50), (118, 50)]


def test_what_a_fork_has_passed_over_since_it_was_made(paths: RunPaths) -> None:
    """Its first roster is of a later generation than what it was made of."""
    save(paths, 90, "a", generation=7, skips=[[20, 5]])
    identity = identify(paths)
    assert skips_of(find(paths, identity)) == ((20, 5),)
    with EventLog(paths.events) as log:
        log.append(replace(ROSTER, generation=8, step=90, outcome="start"))
        log.append(WentBack(time=3, step=90, before=103, reason="a spike", skip=[100, 50]))
    assert skips_of(find(paths, identity)) == ((20, 5), (100, 50))
