"""Which checkpoints are a run's own.

A run directory gets a random id at its first start, which stands in every checkpoint. At that start
it takes whatever checkpoints it finds: a copy of another run's is a fork on purpose. From then on
its own are those with its id, with the ids found then, or with none (imported, or of an earlier
version), and always those of its own model. Another one that gets into the store, by a copy or by a
second run that writes to the same place, is passed over with a warning that says why, and the
newest one of its own is taken; the run's start sets the other aside (`resume.set_others_aside`).
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from checkpointing import (
    CheckpointError,
    CorruptError,
    Keys,
    Manifest,
    TensorInfo,
    check_compatible,
    newest,
    open_store,
    run_of,
)
from checkpointing.whole_file import write_whole
from elastic.protocol.run_paths import RunPaths
from trainer.engine.names import PARAMETERS
from trainer.recovery.numbers import numbers_of

log = logging.getLogger(__name__)

StateTable = Mapping[str, TensorInfo]
"""What a model's state is: `trainer.engine.state.state_table`."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Who a run is."""

    id: str
    """Random; it stays with the directory, also where that is renamed."""
    origins: tuple[str, ...] = ()
    """Ids in the checkpoints that were there at its first start."""

    def owns(self, run: str | None) -> bool:
        """Whether a checkpoint with the id `run` is one of this run's."""
        return run is None or run == self.id or run in self.origins


def identify(paths: RunPaths) -> RunIdentity:
    """The identity of the run in a directory; a new one, not recorded yet, before its first start
    and where the file is lost."""
    if (recorded := recorded_identity(paths)) is not None:
        return recorded
    found = {run_of(manifest) for manifest in _readable(paths)}
    return RunIdentity(id=uuid.uuid4().hex, origins=tuple(sorted(run for run in found if run)))


def recorded_identity(paths: RunPaths) -> RunIdentity | None:
    """What stands in a directory; None before the first start, and where the file is lost."""
    try:
        told = json.loads(paths.identity.read_bytes())
        return RunIdentity(id=told["id"], origins=tuple(told["origins"]))
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return None


def record_identity(paths: RunPaths, identity: RunIdentity) -> None:
    """Binds a directory to its run. The driver calls it while it holds the run's lock, when nothing
    refuses the start any more: until then, what is copied here is a fork on purpose."""
    paths.identity.parent.mkdir(parents=True, exist_ok=True)
    write_whole(paths.identity, json.dumps(asdict(identity)))


def newest_own(
    paths: RunPaths,
    identity: RunIdentity,
    model: StateTable | None = None,
    *,
    is_given_up: Callable[[Manifest], bool] = lambda manifest: False,
) -> tuple[Manifest | None, CheckpointError | None]:
    """The newest checkpoint that can be read and is the run's own.

    Args:
        paths: where they are.
        identity: of the run.
        model: what its state is; None where that is not known yet.
        is_given_up: whether the run has gone back for what a checkpoint holds, or never came to it.

    Returns:
        It, and why the newest of those passed over is not.
    """
    passed: CheckpointError | None = None
    for manifest in _readable(paths):
        if is_given_up(manifest):
            log.warning(
                "passing over step %d: the run is not that far, or went back", manifest.step
            )
            continue
        try:
            check_own(manifest, identity, model)
        except CheckpointError as error:
            log.warning("passing over the checkpoint of step %d: %s", manifest.step, error)
            passed = passed or error
        else:
            return manifest, passed
    return None, passed


def check_own(manifest: Manifest, identity: RunIdentity, model: StateTable | None) -> None:
    """Checks that a checkpoint is of this run and of its model, and that a run can go on from it.

    Raises:
        CorruptError: it is another run's, or lacks what a trainer keeps beside the tensors.
        IncompatibleError: it is of another model.
    """
    if not identity.owns(run_of(manifest)):
        state: Mapping[str, Any] = manifest.training_state["run"]
        raise CorruptError(
            Keys().commit(manifest.step),
            f"run: it was written by run {state.get('name')!r} with id {state['id']}, and this "
            f"directory belongs to the run with id {identity.id}. To go on from it, copy its "
            f"checkpoints to a directory of their own",
        )
    numbers_of(manifest.step, manifest.training_state)
    if model is not None:
        check_model(manifest, model)


def check_model(manifest: Manifest, model: StateTable) -> None:
    """Checks that a checkpoint has exactly the tensors of `model`, moments of the same names
    included. Those of a parameter that is frozen now do not count.

    Raises:
        IncompatibleError: naming the first tensors that differ.
    """
    kinds = {name.split("/", 1)[0] for name in model}
    spare = {}
    for name, info in manifest.tensors.items():
        kind, _, parameter = name.partition("/")
        if kind in kinds and PARAMETERS + parameter in model:
            spare[name] = info
    check_compatible(manifest, {**spare, **model})


def _readable(paths: RunPaths) -> Iterator[Manifest]:
    """From the newest on."""
    store, keys, before = open_store(paths.checkpoints), Keys(), None
    while (manifest := newest(store, keys, before=before)) is not None:
        yield manifest
        before = manifest.step
