"""What all exchanges share: tensors in bounded pieces, and directories that appear whole."""

from __future__ import annotations

import errno
import glob
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from checkpointing import Manifest
from checkpointing.format.boxes import Box, Index
from checkpointing.format.cutting import row_strides, split_box
from checkpointing.whole_file import sync
from trainer.engine.names import PARAMETERS
from trainer.errors import ExchangeError
from trainer.models.hf import recorded

log = logging.getLogger(__name__)

PIECE_BYTES = 128 << 20
"""Bound on the bytes of a tensor that are in memory at once."""


def pieces_of(name: str, shape: Index, item_bytes: int) -> Iterator[Box]:
    """The whole of a tensor as boxes of at most PIECE_BYTES, each of them contiguous, in order."""
    if not math.prod(shape):
        return
    boxes = split_box(
        (0,) * len(shape),
        shape,
        row_strides(shape, item_bytes),
        item_bytes=item_bytes,
        max_bytes=PIECE_BYTES,
        max_stride_bytes=PIECE_BYTES,
    )
    for offsets, sizes in boxes:
        yield Box(name, offsets, sizes)


def parameter_names(manifest: Manifest) -> list[str]:
    """Names of the model's parameters in a checkpoint, sorted.

    Raises:
        ExchangeError: there are none: the checkpoint was not written by a trainer.
    """
    names = [name.removeprefix(PARAMETERS) for name in manifest.tensors if _is_parameter(name)]
    if not names:
        raise ExchangeError(
            f"step {manifest.step}",
            f"none of its {len(manifest.tensors)} tensors is a parameter ({PARAMETERS}…)",
            "Name a checkpoint that a training run has written",
        )
    return sorted(names)


def moment_names(manifest: Manifest) -> list[str]:
    """Names of the moments in a checkpoint, such as `exp_avg`, sorted."""
    kinds = {name.split("/", 1)[0] for name in manifest.tensors if not _is_parameter(name)}
    return sorted(kinds)


def _is_parameter(name: str) -> bool:
    return name.startswith(PARAMETERS)


def model_config(manifest: Manifest, given: Path | None) -> dict[str, Any] | None:
    """The transformers configuration of a checkpoint's model; None where nobody knows it.

    Args:
        manifest: the checkpoint; one of a `CausalLM` task has it.
        given: a config.json, or a directory with one, which comes first.

    Raises:
        ExchangeError: `given` cannot be read.
    """
    if given is not None:
        return read_config(given)
    task = manifest.training_state.get("task")
    model = task.get("model") if isinstance(task, Mapping) else None
    return dict(model) if isinstance(model, Mapping) and "model_type" in model else None


def read_config(given: Path) -> dict[str, Any]:
    """A transformers configuration from a config.json or a directory with one, as a checkpoint has
    it."""
    file = given / "config.json" if given.is_dir() else given
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config["model_type"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ExchangeError(
            str(file),
            f"not a transformers configuration ({type(error).__name__}: {error})",
            "Give the config.json of the model, or the directory that holds it",
        ) from error
    return recorded(config)


@contextmanager
def finished_directory(target: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `target` when the context ends well.

    Raises:
        ExchangeError: there is something at `target` already, or it cannot be written.
    """
    target = Path(os.path.realpath(target))  # nothing is renamed onto a link
    for left in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 32}.part"):
        log.warning(
            "%s was left by an export that was killed: remove it, unless another one is under way",
            left,
        )
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        if target.exists():
            if os.listdir(target):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            try:
                os.rename(target, part)  # a mount point shows here, and not when all is written
                os.rename(part, target)
            except OSError as error:
                if (
                    error.errno != errno.EXDEV
                ):  # overlayfs replaces an image's, and does not move it
                    raise
    except OSError as error:
        raise ExchangeError(
            str(target),
            f"it exists and cannot be replaced: {error.strerror}",
            "Name a directory that is not there",
        ) from error
    try:
        part.mkdir(parents=True)
        yield part
        for file in part.iterdir():
            sync(file)
        os.rename(part, target)
        with suppress(OSError):  # not every file system can
            sync(target)
            sync(target.parent)
    except OSError as error:
        raise ExchangeError(
            str(target), f"it cannot be written: {error}", "Free space there, or write elsewhere"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
