"""A torch.distributed.checkpoint directory as a checkpoint: weights, and an optimizer's moments if
they are there, such as AdamW's:

    saved as                                       becomes
    {fqn: w}  or  {"model": {fqn: w}}              param/{fqn}
    {"optimizer" or "optim": {"state": {fqn: {"exp_avg", "exp_avg_sq"}}}}
                                                   exp_avg/{fqn}, exp_avg_sq/{fqn}
    … "step" of the optimizer state                the number of optimizer steps
    {"train_state": {"step": n}}                   the step

The first form is torchtitan's, the second that of PyTorch's tutorials; nested and flattened
optimizer states look alike. Everything else (schedulers, data loaders, parameter groups) is left
behind: a run has its own. Chunks are taken over as they are, whatever layout wrote them.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpointing import Keys, Manifest, Store, TensorSlice
from checkpointing.format.boxes import Index
from checkpointing.format.dtypes import DTYPES
from trainer.engine.names import PARAMETERS
from trainer.errors import ExchangeError
from trainer.exchange.dcp_metadata import DcpMetadata, StoredBytes, StoredTensor, read_metadata
from trainer.exchange.intake import Incoming, commit_incoming, fresh_moments, stored_dtype
from trainer.exchange.pieces import read_config
from trainer.models.hf import ModelConfig, build_on_meta

_OPTIMIZERS = ("optimizer", "optim")
_OTHERS = ("train_state", "lr_scheduler", "dataloader", *_OPTIMIZERS)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a DCP checkpoint holds, under our names. Values are its flat names."""

    parameters: Mapping[str, str]
    """By the parameter's name."""
    moments: Mapping[str, str]
    """By the name of the moment, such as `exp_avg/lm_head.weight`."""
    optimizer_step: str | None
    """The number of steps that the optimizer has done."""
    step: str | None
    """The step of the run."""
    ignored: tuple[str, ...]
    """Tensors that have no place in a checkpoint of ours."""


def import_dcp(
    store: Store,
    keys: Keys,
    source: Path,
    *,
    step: int | None,
    moments: Sequence[str],
    config_path: Path | None = None,
) -> tuple[Manifest, list[str]]:
    """Commits what is in `source` as a checkpoint.

    Args:
        store: where to.
        keys: names in the store.
        source: the directory with `.metadata`.
        step: step at which a run goes on; None takes the checkpoint's own.
        moments: those of the run's optimizer, under which names the source has them, too.
        config_path: the model's config.json: then only its parameters are taken, which leaves out
            the second copy of tied ones, and the checkpoint can be exported to Hugging Face.

    Returns:
        The manifest, and what the user should know, a sentence each.

    Raises:
        ExchangeError: `source` is not a DCP checkpoint of a model, or its step is unknown.
        CheckpointError: see `commit_incoming`.
    """
    metadata = read_metadata(source)
    contents = plan_contents(metadata, moments)
    shapes = {name: metadata.tensors[flat].shape for name, flat in contents.parameters.items()}
    config = None if config_path is None else read_config(config_path)
    if config is not None:
        shapes = _check_model(source, shapes, config)
    if not shapes:
        raise ExchangeError(str(source), "it holds no weights", "Name a checkpoint of a model")
    wanted = step if step is not None else _own_step(source, metadata, contents)
    fresh = dict.fromkeys(  # in their order
        name
        for name in shapes
        if any(f"{moment}/{name}" not in contents.moments for moment in moments)
    )
    told = _number(source, metadata, contents.optimizer_step)
    # Moments without a count are taken for one of each step; a count of 0 is one.
    kept = bool(moments) and len(fresh) < len(shapes)
    done = 0 if not kept else wanted if told is None else told
    state = {
        "optimizer_steps": done,
        "imported": {"from": "dcp", "path": str(source)},
        **({} if config is None else {"task": {"model": config}}),
    }
    incoming = (
        item
        for name in shapes
        for item in _parameter(
            source, metadata, contents, name, moments=moments, fresh=name in fresh
        )
    )
    manifest = commit_incoming(store, keys, incoming, step=wanted, training_state=state)
    return manifest, _remarks(contents, shapes, fresh, done)


def plan_contents(metadata: DcpMetadata, wanted: Sequence[str]) -> Contents:
    """Sorts the entries by what they are. Pure. `wanted`: names of the moments."""
    parameters, moments, ignored = {}, {}, []
    entry = re.compile(rf"state\.(.+)\.({'|'.join(('step', *wanted))})")
    optimizer_step = step = None
    for flat in (*metadata.tensors, *metadata.objects):
        path = metadata.paths.get(flat) or _guess_path(flat)
        is_tensor = flat in metadata.tensors
        state = entry.fullmatch(".".join(path[1:]))
        if path[0] in _OPTIMIZERS and state and is_tensor:
            if state[2] == "step":
                optimizer_step = optimizer_step or flat
            else:
                moments[f"{state[2]}/{state[1]}"] = flat
        elif path == ("train_state", "step"):
            step = flat
        elif is_tensor and path[0] == "model" and len(path) > 1:
            parameters[".".join(path[1:])] = flat
        elif is_tensor and len(path) == 1:
            parameters[flat] = flat
        elif is_tensor:
            ignored.append(flat)
    return Contents(
        parameters=parameters,
        moments=moments,
        optimizer_step=optimizer_step,
        step=step,
        ignored=tuple(ignored),
    )


def _guess_path(flat: str) -> tuple[str, ...]:
    """For a checkpoint saved without flattening, whose metadata has no paths."""
    root, _, rest = flat.partition(".")
    return (root, rest) if root in _OTHERS and rest else (flat,)


def _check_model(source: Path, shapes: Mapping[str, Index], config: Any) -> dict[str, Index]:
    settings = {key: value for key, value in config.items() if key != "model_type"}
    resolved = ModelConfig(architecture=config["model_type"], settings=settings).resolve(0)
    model = build_on_meta(resolved)
    wanted = {name: tuple(param.shape) for name, param in model.named_parameters()}
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            raise ExchangeError(
                str(source),
                f"parameter {name} of the model is {list(shape)}, and "
                f"{list(shapes[name]) if name in shapes else 'absent'} in the checkpoint",
                "Give the configuration of the model that was saved, or convert its names first",
            )
    return wanted


def _own_step(source: Path, metadata: DcpMetadata, contents: Contents) -> int:
    for flat in (contents.step, contents.optimizer_step):
        number = _number(source, metadata, flat)
        if number is not None:
            return number
    raise ExchangeError(str(source), "it does not say its step", "Give it with --step")


def _number(source: Path, metadata: DcpMetadata, flat: str | None) -> int | None:
    """A number that was saved as a tensor or as itself."""
    if flat is None:
        return None
    tensor = metadata.tensors.get(flat)
    value = _load(source, flat, metadata.objects[flat] if tensor is None else tensor.chunks[0][2])
    return int(value) if isinstance(value, (int, float, torch.Tensor)) else None


def _parameter(
    source: Path,
    metadata: DcpMetadata,
    contents: Contents,
    name: str,
    *,
    moments: Sequence[str],
    fresh: bool,
) -> Iterator[Incoming]:
    flat = contents.parameters[name]
    shape = metadata.tensors[flat].shape
    yield from _chunks(source, flat, metadata.tensors[flat], PARAMETERS + name)
    if fresh:
        yield from fresh_moments(name, shape, moments)
        return
    for moment in moments:
        flat = contents.moments[f"{moment}/{name}"]
        yield from _chunks(source, flat, metadata.tensors[flat], f"{moment}/{name}")


def _chunks(source: Path, flat: str, tensor: StoredTensor, name: str) -> Iterator[Incoming]:
    dtype = stored_dtype(tensor.dtype)
    if dtype not in DTYPES:
        raise ExchangeError(str(source), f"{flat} is {tensor.dtype}", "Save it in another type")
    for offsets, sizes, where in tensor.chunks:
        yield Incoming(
            part=TensorSlice(name, tensor.shape, dtype, offsets, sizes),
            read=partial(_read_chunk, source, flat, tensor.dtype, sizes, where),
        )


def _read_chunk(
    source: Path, flat: str, dtype: str, sizes: Index, where: StoredBytes
) -> torch.Tensor:
    value = _load(source, flat, where)
    if isinstance(value, torch.Tensor) and value.dtype == getattr(torch, dtype):
        if tuple(value.shape) == sizes:
            return value
        value = f"a tensor of shape {list(value.shape)}"
    raise ExchangeError(
        str(source / where.file),
        f"{flat} should be {dtype} {list(sizes)} at byte {where.offset}, and is {value!r:.60}",
        "Restore the directory from a copy",
    )


def _load(source: Path, flat: str, where: StoredBytes) -> Any:
    """One entry. `weights_only` builds tensors and plain values, and refuses all else.

    torch does not look at the checksums that it has written into the archive.
    """
    file = source / where.file
    try:
        with file.open("rb") as stream:
            stream.seek(where.offset)
            data = io.BytesIO(stream.read(where.length))
        with zipfile.ZipFile(data) as archive:
            bad = archive.testzip()
        if bad is not None:
            raise ValueError(f"the CRC32 of {bad} differs")
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive fails in many ways
        reason = str(error).strip().partition("\n")[0][:200]
        raise ExchangeError(
            str(file),
            f"{flat} cannot be read at byte {where.offset} ({type(error).__name__}: {reason})",
            "Restore the directory from a copy",
        ) from error


def _remarks(
    contents: Contents, shapes: Mapping[str, Index], fresh: Mapping[str, object], done: int
) -> list[str]:
    """`fresh`: parameters whose moments start at 0. `done`: steps of the optimizer."""
    remarks = []
    if fresh:
        remarks.append(
            f"The optimizer moments of {len(fresh)} of {len(shapes)} parameters start at 0, as not "
            f"all of theirs are in it, first {next(iter(fresh))}. If it has others, name them with "
            "--moments."
        )
    if fresh and done:
        remarks.append(
            f"The number of optimizer steps, {done:,}, is one for all parameters: AdamW corrects "
            "moments that start at 0 for the wrong bias. Where those parameters are not frozen, "
            "import a copy without the optimizer."
        )
    left = [*contents.ignored, *(name for name in contents.parameters if name not in shapes)]
    left += [
        flat
        for moment, flat in contents.moments.items()
        if (name := moment.split("/", 1)[1]) in fresh or name not in shapes
    ]
    if left:
        remarks.append(f"{len(left)} tensors were left behind, first {left[0]}.")
    return remarks
