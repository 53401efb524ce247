"""Where a run's records lie, what it goes on from, and whether that is the same run. The driver's
part, before anything starts."""

from __future__ import annotations

import logging
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ray.train import RunConfig

from checkpointing import (
    CheckpointConfig,
    CheckpointError,
    CorruptError,
    IncompatibleError,
    Keys,
    Manifest,
    MissingError,
    NotCommittedError,
    Snapshot,
    Store,
    StoreError,
    StorePlace,
    Surveyor,
    give_up,
    is_sound,
    list_steps,
    open_store,
    set_foreign_aside,
    sweep_orphans,
)
from checkpointing.config import Resume
from checkpointing.named_directory import named_directory
from checkpointing.read.catalogue import SET_ASIDE, is_foreign
from checkpointing.stores.keys import PROBE
from elastic.driver.given_up import GivenUp, find_given_up, is_given_up
from elastic.protocol.events import CheckpointCommitted, Event, RegroupDone, RunStarted, WentBack
from elastic.protocol.run_identity import (
    RunIdentity,
    StateTable,
    check_own,
    newest_own,
    recorded_identity,
)
from elastic.protocol.run_paths import RunPaths, hold_run
from elastic.protocol.versions import describe_change
from elastic.reporting.event_log import last_step
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.loop.samples import Skip, Skips
from trainer.models.hf import find_differing
from trainer.progress import tell
from trainer.tasks.causal_lm import CausalLM, PreparedCausalLM
from trainer.tasks.task import PreparedTask

log = logging.getLogger(__name__)

_READS = 8
"""Commit records that are read at once: on S3 a request each, and one may take 100 MB."""
KINDS = CheckpointCommitted, RegroupDone, RunStarted, WentBack
"""Of events, that are looked at here."""


@contextmanager
def run_directory(
    run_config: RunConfig,
    checkpoint: CheckpointConfig,
    claim: Callable[[RunPaths], None] = lambda paths: None,
) -> Iterator[RunPaths]:
    """The run directory, checked and held against other drivers while the context lasts.

    For `resume="never"` an earlier run of this name is set aside first.

    Args:
        run_config: where it is.
        checkpoint: where checkpoints are, and what becomes of an earlier run.
        claim: called as soon as it is held, before anything is moved or looked at; raises where
            the run goes on all the same.

    Raises:
        ConfigError: the storage cannot be used.
        RunGoesOnError: a run of this name is going on.
    """
    storage = str(run_config.storage_path)
    paths = RunPaths(
        root=run_root(run_config),
        store=checkpoint.place(str(run_config.name)),
    )
    with ExitStack() as held:
        with _must_be_writable(storage):
            paths.root.parent.mkdir(parents=True, exist_ok=True)
            _check_no_file(paths)
            held.enter_context(hold_run(paths))
            if checkpoint.resume == "never":
                _check_may_move(paths)
        claim(paths)
        with _must_be_writable(storage):
            if paths.store is not None:
                _check_place(paths.store, checkpoint.resume)
            aside = _set_aside(paths) if checkpoint.resume == "never" else None
            if paths.store is None:
                _check_store(open_store(paths.checkpoints))
        if aside is not None:
            log.warning("resume='never': the earlier run was moved to %s", aside)
        yield paths


@contextmanager
def _must_be_writable(storage: str) -> Iterator[None]:
    try:
        yield
    except (OSError, StoreError) as error:
        raise ConfigError(
            "run_config.storage_path",
            storage,
            f"it cannot be written: {error}",
            f"Use a directory that user {os.getuid()} may write",
        ) from error


def _check_no_file(paths: RunPaths) -> None:
    """Raises ConfigError where a file lies in the place of the run directory."""
    if paths.root.exists() and not paths.root.is_dir():
        raise ConfigError(
            "run_config.name", paths.root.name, f"{paths.root} is a file", "Use another name"
        )


def _check_may_move(paths: RunPaths) -> None:
    """Raises ConfigError where something else than a run would be set aside."""
    root = paths.root
    if root.exists() and not (_is_empty(root) or _is_run(paths)):
        raise ConfigError(
            "run_config.name",
            root.name,
            f"resume='never' moves an earlier run aside, and {root} is no run: it has no "
            f"{paths.identity.name} of one, and no checkpoints",
            "Use another name or storage_path, or move it yourself",
        )


def _set_aside(paths: RunPaths) -> Path | None:
    """Moves an earlier run of this name out of the way. Returns where to."""
    return None if _is_empty(paths.root) else paths.set_aside()


def _is_empty(root: Path) -> bool:
    """Whether there is just what a start that was refused has made."""
    return root.is_dir() and all(path.is_dir() for path in root.rglob("*"))


def _is_run(paths: RunPaths) -> bool:
    """Whether a run has begun in this directory, or checkpoints were brought there for one."""
    if recorded_identity(paths) is not None:
        return True
    return paths.store is None and bool(list_steps(open_store(paths.checkpoints), Keys()))


def _check_store(store: Store) -> None:
    store.check_writable()
    store.delete_many(store.list(PROBE))  # of drivers that were killed in that check


def _check_place(store: StorePlace, resume: Resume) -> None:
    """Raises ConfigError where checkpoints cannot be written, or those there could not stay."""
    try:
        opened = open_store(store)
        _check_store(opened)
        steps = list_steps(opened, Keys())
    except CheckpointError as error:
        raise ConfigError(
            "checkpoint.store",
            str(store),
            f"it cannot be used: {error}",
            "Check that every node may write there; for S3 see examples/aws/README.md",
        ) from error
    if resume == "never" and steps:
        raise ConfigError(
            "checkpoint.resume",
            resume,
            f"{store} has checkpoints of an earlier run, up to step {steps[-1]}, and what lies "
            f"there cannot be set aside",
            "Use another run_config.name, or delete them",
        )


def run_root(run_config: RunConfig) -> Path:
    """The run directory; see `local_path`."""
    return Path(local_path(run_config), str(run_config.name))


def local_path(run_config: RunConfig) -> str:
    """`storage_path` as a plain absolute path: other processes have other working directories, and
    Ray Train takes a relative one for a URL.

    Raises:
        ConfigError: it is no directory, but a store such as S3.
    """
    storage = str(run_config.storage_path)
    if "://" in storage and not storage.startswith("file://"):
        raise ConfigError(
            "run_config.storage_path",
            f"{storage.partition('://')[0]}://..." if "@" in storage else storage,  # a password
            "this version stores the records of a run in a local or shared directory",
            "Use a directory that all nodes see, and checkpoint.store for checkpoints on S3",
        )
    return str(named_directory(storage))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run goes on from."""

    stored: Manifest | None
    """The newest checkpoint of its own."""
    snapshot: Snapshot | None
    """A newer state in the nodes' memory."""
    passed: CheckpointError | None
    """Why the newest of those that can be read, but are not the run's own, is not."""
    happened: Sequence[Event] = ()
    """The events of the run so far, at least those of `KINDS`."""

    @property
    def manifest(self) -> Manifest | None:
        """The newer one of the two; None: the run begins from the seed."""
        return self.stored if self.snapshot is None else self.snapshot.manifest


def find_stored(
    paths: RunPaths, happened: Sequence[Event], identity: RunIdentity, model: StateTable | None
) -> Origin:
    """Looks for the newest checkpoint of a run.

    Args:
        paths: where checkpoints are.
        happened: the events of the run so far, at least those of `KINDS`.
        identity: of the run.
        model: what the state is; None where that is not known yet.
    """
    gave_up = partial(is_given_up, find_given_up(happened), identity)
    stored, passed = newest_own(paths, identity, model, is_given_up=gave_up)
    return Origin(stored=stored, snapshot=None, passed=passed, happened=happened)


def add_snapshot(
    origin: Origin, identity: RunIdentity, snapshot: Snapshot | None, model: StateTable | None
) -> Origin:
    """What the run goes on from: a newer state in the nodes' memory, where it is the run's own."""
    if snapshot is None or (origin.stored is not None and snapshot.step <= origin.stored.step):
        return origin
    if is_given_up(find_given_up(origin.happened), identity, snapshot.manifest):
        return origin
    try:
        check_own(snapshot.manifest, identity, model)
        return replace(origin, snapshot=snapshot)
    except CheckpointError as error:
        log.warning("passing over the snapshot of step %d: %s", snapshot.step, error)
        return replace(origin, passed=error)


def check_found(paths: RunPaths, identity: RunIdentity, resume: Resume, origin: Origin) -> None:
    """Raises ConfigError where there is no state to go on from, and `resume` is "must" or there was
    one: a run that has lost its checkpoints does not begin again without being told to. One that
    went back to the seed does: what it went back for is no state to go on from. Where there is a
    state, but not the newest that was committed, it raises in another store (`warn_of_older`)."""
    given_up, step = find_given_up(origin.happened), _missing(origin)
    if origin.manifest is not None:
        if step is not None and _other_store(paths, origin.happened) is not None:
            raise _lost(paths, resume, step, origin)
        return
    if origin.passed is not None:
        raise _not_own(paths, origin.passed)
    gave_up = partial(is_given_up, given_up, identity)
    if resume != "never" and (unreadable := _unreadable(paths, gave_up)):
        raise ConfigError(
            "checkpoint.resume",
            resume,
            f"no checkpoint in {paths.checkpoints} can be read; there are {'; '.join(unreadable)}",
            f"Repair them, use the version that wrote them, or begin anew: delete them, or use "
            f"{_to_begin_anew(paths)}",
        )
    if resume != "never" and step is not None:
        raise _lost(paths, resume, step, origin)
    if resume == "must":
        raise ConfigError(
            "checkpoint.resume",
            resume,
            f"there is no checkpoint in {paths.checkpoints}",
            "Check run_config.name and storage_path, or use resume='auto'",
        )


def warn_of_older(paths: RunPaths, origin: Origin) -> None:
    """Warns where the state that a run goes on from is not the newest that was committed."""
    found, step = origin.manifest, _missing(origin)
    if found is not None and step is not None:
        log.warning(
            "%s tells of a checkpoint of step %d, and the newest state that is found is of "
            "step %d: the run goes on from there. If the checkpoint is somewhere, stop the run "
            "and bring it to %s",
            paths.events, step, found.step, paths.checkpoints,
        )  # fmt: skip


def _not_own(paths: RunPaths, why: CheckpointError) -> ConfigError:
    if isinstance(why, IncompatibleError):
        return ConfigError(
            "run_config.name",
            paths.root.name,
            f"what was saved under it is of another model: tensor {why.name!r}: {why.fact} "
            f"({why.count} tensors differ)",
            f"Use the same model, and optimizer.master_dtype and moment_dtype as they were, or "
            f"{_to_begin_anew(paths)}",
        )
    return ConfigError(
        "run_config.name",
        paths.root.name,
        f"what was saved under it is of another run: {why}",
        f"To begin anew, use {_to_begin_anew(paths)}",
    )


def _lost(paths: RunPaths, resume: Resume, step: int, origin: Origin) -> ConfigError:
    """A checkpoint was committed, and there is none, or an older one: where the store is another
    one than it was, that is why."""
    fact = f"a checkpoint of step {step} was committed"
    found = "there is none" if origin.manifest is None else f"the newest is {origin.manifest.step}"
    there = f"by {paths.events}, and {found} in {paths.checkpoints}"
    if (before := _other_store(paths, origin.happened)) is not None:
        return ConfigError(
            "checkpoint.store",
            None if paths.store is None else str(paths.store),
            f"{fact} to {before}, {there}",
            f"Set checkpoint.store as it was, bring the checkpoints here, or begin anew: use "
            f"{_to_begin_anew(paths)}",
        )
    return ConfigError(
        "checkpoint.resume",
        resume,
        f"{fact}, {there}",
        f"Bring the checkpoints back, or begin anew: use {_to_begin_anew(paths)}",
    )


def _other_store(paths: RunPaths, happened: Sequence[Event]) -> str | None:
    """Where checkpoints went at the last start, if that is not where they go now. None, too, where
    its record does not say."""
    stores = [event.store for event in happened if isinstance(event, RunStarted)]
    before = stores[-1] if stores else None
    now = "" if paths.store is None else str(paths.store)
    if before is None or before == now:
        return None
    return before or "the directory of the run"


def _to_begin_anew(paths: RunPaths) -> str:
    """What to change: what lies in a store elsewhere cannot be set aside."""
    other = "another run_config.name"
    return other if paths.store is not None else f"{other} or resume='never'"


def _unreadable(paths: RunPaths, gave_up: Callable[[Manifest], bool]) -> list[str]:
    """Commit records that cannot be read, with what is wrong, and all that were set aside, where
    none can; without those that the run went back for, which are set aside though sound."""
    store, keys, endings = open_store(paths.checkpoints), Keys(), (".json", f".json{SET_ASIDE}")

    def told(key: str) -> str | None:
        try:
            return None if gave_up(Manifest.from_bytes(store.get(key), key)) else key
        except (CorruptError, MissingError) as error:
            return str(error).rstrip(".")

    listed = store.list(keys.commits)
    found = [key for key in listed if key.endswith(endings) or is_foreign(keys, key)]
    return [words for key in found if (words := told(key)) is not None]


def _missing(origin: Origin) -> int | None:
    """The newest checkpoint that the records tell of, where no state is found that is as new."""
    step = _last_committed(origin.happened, find_given_up(origin.happened))
    found = -1 if origin.manifest is None else origin.manifest.step
    return step if step is not None and step > found else None


def _last_committed(happened: Sequence[Event], given_up: Sequence[GivenUp]) -> int | None:
    """The newest checkpoint that the records tell of, without those that the run went back for, or
    that a later start or restore could not take."""
    void = list(given_up)
    for event in happened:
        if isinstance(event, RegroupDone) and event.outcome in ("start", "restore"):
            void.append(GivenUp(step=event.step, generation=event.generation))
    told = [e for e in happened if isinstance(e, CheckpointCommitted)]
    counting = (e for e in told if not any(v.holds(e.step, e.generation) for v in void))
    return max((e.step for e in counting), default=None)


def last_generation(origin: Origin) -> int:
    """The last generation that anything was written under: a continued run goes on above it."""
    rosters = [e.generation for e in origin.happened if isinstance(e, RegroupDone)]
    return max([0 if origin.manifest is None else origin.manifest.generation, *rosters])


def steps_done(paths: RunPaths) -> int:
    """How far the run had come when it stopped, by its records."""
    last = last_step(paths.steps, counts=lambda _: True)
    return 0 if last is None else last.step + 1


_Kind = Literal["own", "given up", "foreign", "damaged", "gone"]


def set_others_aside(
    paths: RunPaths, origin: Origin, identity: RunIdentity, model: StateTable | None
) -> Surveyor:
    """Moves commit records out of the way that the run does not go on from.

    Those of another run, model or version go wherever they stand, so that retention neither counts
    nor deletes them; nothing of them is lost. What has its seal is one of them, and not damaged,
    also where this version does not know what it says. Damaged ones go where they stand after the
    newest of its own: their steps are done again; and so do those that the run went back for, where
    whoever had to set them aside had no time for it. Retention deletes both.

    Args:
        paths: where they are.
        origin: what the run goes on from.
        identity: of the run.
        model: what its state is; None where that is not known.

    Returns:
        For `remove_orphans`: it has read all records.
    """
    store, keys = open_store(paths.checkpoints), Keys()
    surveyor, steps = Surveyor(store=store, keys=keys), list_steps(store, keys)
    stored, gave_up = origin.stored, partial(is_given_up, find_given_up(origin.happened), identity)
    kind_of = partial(_kind, surveyor, identity, model, gave_up)
    kinds = list[_Kind]()
    with ThreadPoolExecutor(_READS, thread_name_prefix="records") as pool:
        for kind in pool.map(kind_of, steps):
            tell("looking at the checkpoints that are there", len(kinds), len(steps))
            kinds.append(kind)
    for step, kind in zip(steps, kinds, strict=True):
        later = stored is None or step > stored.step
        if kind in ("damaged", "given up") and later:
            give_up(store, keys, step)
        elif kind == "foreign" or (kind == "own" and later):  # an import a moment ago
            set_foreign_aside(store, keys, step)
        else:
            continue
        surveyor.forget(step)
    return surveyor


def _kind(
    surveyor: Surveyor,
    identity: RunIdentity,
    model: StateTable | None,
    gave_up: Callable[[Manifest], bool],
    step: int,
) -> _Kind:
    try:
        manifest = surveyor.load(step)
        check_own(manifest, identity, model)
        return "given up" if gave_up(manifest) else "own"
    except (CorruptError, IncompatibleError):
        pass
    except NotCommittedError:
        return "gone"
    try:
        return "foreign" if is_sound(surveyor.store.get(Keys().commit(step))) else "damaged"
    except MissingError:
        return "gone"
    except CorruptError:  # no file
        return "damaged"


def remove_orphans(surveyor: Surveyor, generation: int) -> None:
    """Deletes what killed writers have left: uploads that did not end, and segments that no
    checkpoint refers to, written before `generation`, the run's first. `surveyor`: see
    `set_others_aside`."""
    tell("looking for what killed writers have left")
    for key in surveyor.store.abort_unfinished():
        log.warning("removed what a killed writer had left of %s", key)
    removed = sweep_orphans(surveyor, generation)
    if removed:
        tell(f"removed {len(removed)} segments of checkpoints that were never committed")


def skips_of(origin: Origin) -> Skips:
    """Samples that the run has passed over: those that the state it goes on from knows of, and
    those that it went back for since, of which that state is too old to know."""
    manifest = origin.manifest
    state = {} if manifest is None else manifest.training_state
    known = [Skip(*map(int, skip)) for skip in state.get("skips", ())]
    wrote, roster = 0 if manifest is None else manifest.generation, 0
    for event in origin.happened:
        if isinstance(event, RegroupDone):
            roster = event.generation
        elif isinstance(event, WentBack) and event.skip and roster >= wrote:
            known.append(Skip(*event.skip))  # the rosters after this one knew it
    return tuple(known)


def check_continues(
    paths: RunPaths, manifest: Manifest, train: TrainConfig, task: PreparedTask | None = None
) -> None:
    """Checks that a run with these settings continues the one that wrote `manifest`, which is of
    the same model.

    Args:
        paths: the run's.
        manifest: of the checkpoint to go on from.
        train: the settings.
        task: prepared; None: it is not yet, and its data and model are not compared.

    Raises:
        ConfigError: other data, another order of the data, another view of the texts in them,
            another function of the same weights, other lanes, or a degree of `shard` that does not
            go with them.
    """
    state, anew = manifest.training_state, _to_begin_anew(paths)
    if manifest.step > train.steps:
        raise ConfigError(
            "train.steps",
            train.steps,
            f"the run to be continued has done {manifest.step} steps already",
            f"Use {manifest.step} or more, {anew}",
        )
    now = {
        "train.seed": (state.get("seed"), train.seed),
        "train.global_batch": (state.get("global_batch"), train.global_batch),
        "train.lanes": (state.get("lanes"), train.lanes or state.get("lanes")),
    }
    if isinstance(train.task, CausalLM):
        now["train.task.texts"] = (state.get("task", {}).get("texts"), train.task.texts)
    for field, (before, value) in now.items():
        # An imported checkpoint belongs to no run yet, and older versions did not record texts.
        if before is not None and before != value:
            raise ConfigError(
                field,
                value,
                f"the run to be continued has {before}, and would not end with the same weights",
                f"Use {before}, {anew}",
            )
    if "lanes" in state:
        _check_shard(state["lanes"], train, anew)
    if task is None:
        return
    check_function(paths, manifest, task)
    samples = len(task.train_data())
    if (before := state.get("samples", samples)) != samples:
        raise ConfigError(
            "train.task",
            f"{samples:,} samples",
            f"the run to be continued has {before:,}, and would not end with the same weights",
            f"Use the same data, of text the same paths, seq_len, holdout and tokenizer, and the "
            f"version that began the run, where another one cuts its text otherwise; or {anew}",
        )
    had, has = state.get("task", {}), task.info
    comparable = had.get("file_tokens") == has.get("file_tokens")
    digest, before = has.get("train_sha256"), had.get("train_sha256")
    if comparable and digest and before and digest != before:
        raise ConfigError(
            "train.task.data",
            f"tokens with sha256 {digest:.12}",
            f"the run to be continued has others, or in another order (sha256 {before:.12}): it "
            f"would take some twice and others never",
            f"Use the same text, with paths that sort as they did, and holdout and tokenizer as "
            f"they were; or {anew}",
        )


def _check_shard(lanes: int, train: TrainConfig, anew: str) -> None:
    """Raises ConfigError where a lane cannot be cut into so many shards: lanes and batch stay."""
    samples, shard = train.global_batch // lanes, train.parallel.shard
    if samples % shard:
        degrees = [degree for degree in range(1, samples + 1) if samples % degree == 0]
        raise ConfigError(
            "train.parallel.shard",
            shard,
            f"it does not divide the {samples} samples of a lane: the run to be continued has "
            f"{lanes} lanes in a global batch of {train.global_batch}",
            f"Use {' or '.join(map(str, degrees))}, {anew}",
        )


def warn_of_versions(manifest: Manifest, now: Mapping[str, str]) -> None:
    """Warns where the state that the run goes on from was computed with other versions: people
    upgrade on purpose. An imported one belongs to no run yet."""
    changed = describe_change(manifest.versions, now)
    if "seed" in manifest.training_state and changed:
        log.warning(
            "the run goes on from step %d with other versions: %s. From there on its bits may be "
            "others than without the change",
            manifest.step,
            changed,
        )


def check_function(paths: RunPaths, manifest: Manifest, task: PreparedTask) -> None:
    """Raises ConfigError where the model has tensors like those of `manifest`, and is another
    function of them. An imported one may be changed on purpose, to have a longer context say, and
    another version of transformers may fill in more: there it is a warning."""
    before = manifest.training_state.get("task", {}).get("model")
    now = task.info.get("model")
    if not (isinstance(task, PreparedCausalLM) and isinstance(before, dict) and now):
        return
    if not (differing := find_differing(before, now)):
        return
    had, has = (
        ", ".join(f"{key} = {reprlib.repr(both[i])}" for key, both in differing.items())
        for i in (0, 1)
    )
    versions = [config.get("transformers_version") for config in (before, now)]
    if "seed" not in manifest.training_state or versions[0] != versions[1]:
        log.warning(
            "the checkpoint's model has %s, and this run has %s (transformers %s and %s): with the "
            "same weights that may be another model",
            had, has, *versions,
        )  # fmt: skip
        return
    raise ConfigError(
        "train.task.model",
        has,
        f"the run to be continued has {had}: with the same weights it is another model",
        f"Use train.task.model as it was, and the config.json of model.path where it has one, or "
        f"{_to_begin_anew(paths)}",
    )
