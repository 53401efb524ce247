"""A checkpoint's weights as a Hugging Face model directory.

    model-00001-of-00003.safetensors …   shards of bounded size
    model.safetensors.index.json         which tensor lies in which shard
    config.json                          the model's configuration
    tokenizer.json, tokenizer_config.json  where the run's tokenizer is still there, with what lies
                                         beside the one that it was made from

Tensors go out in the element type and under the names of the checkpoint, which are those of the
transformers model. Of tied parameters the checkpoint holds one, and `from_pretrained` ties the
other to it. Buffers that a model saves with its weights are not in a checkpoint: a pretrained
model's are those of the directory that it came from, and go to a shard of their own.
Source: https://huggingface.co/docs/transformers/main_classes/model (sharded checkpoints)
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from checkpointing import Reader, TensorSlice
from checkpointing.format.cutting import pack
from checkpointing.format.dtypes import item_bytes
from checkpointing.format.segment import header, slice_bytes
from checkpointing.format.tensor_bytes import raw_bytes
from trainer.data.tokenizer import END_OF_TEXT
from trainer.engine.names import PARAMETERS
from trainer.errors import ConfigError, ExchangeError
from trainer.exchange.pieces import finished_directory, model_config, parameter_names, pieces_of
from trainer.models.hf import build_on_meta
from trainer.models.init import saved_buffers
from trainer.models.pretrained import INDEX, PretrainedWeights

SHARD_BYTES = 5 * 10**9
"""Default bound on the tensor bytes in a shard, as in transformers."""

_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def export_hf(
    reader: Reader,
    target: Path,
    *,
    config_path: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Writes the weights of a checkpoint so that `AutoModelForCausalLM.from_pretrained` loads them.

    Args:
        reader: the checkpoint.
        target: directory to make; it appears when all is written.
        config_path: the model's config.json, for a checkpoint that does not hold it.
        shard_bytes: bound on the tensor bytes in a shard; a larger tensor has its own.

    Returns:
        What the user should know, a sentence each.

    Raises:
        ExchangeError: the configuration is unknown, the directory with the buffers cannot be read,
            or `target` cannot be written.
        CheckpointError: the checkpoint cannot be read.
    """
    config = model_config(reader.manifest, config_path)
    if config is None:
        raise ExchangeError(
            f"step {reader.manifest.step}",
            "the checkpoint does not hold a transformers configuration",
            "Name the model's config.json with --config",
        )
    slices = [_whole(reader, name) for name in parameter_names(reader.manifest)]
    shards = pack([slice_bytes(part) for part in slices], shard_bytes)
    buffers = _buffers(config, reader.manifest.training_state)
    count = len(shards) + bool(buffers)
    with finished_directory(target) as directory:
        weight_map: dict[str, str] = {}
        for number, members in enumerate(shards, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            _write_shard(reader, directory / file, [slices[member] for member in members])
            weight_map.update({slices[member].name: file for member in members})
        if buffers:
            file = f"model-{count:05}-of-{count:05}.safetensors"
            save_file(buffers, directory / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(buffers, file))
        total = sum(slice_bytes(part) for part in slices)
        total += sum(buffer.nbytes for buffer in buffers.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / INDEX, index)
        _write_json(directory / "config.json", _finished_config(config, slices))
        return _copy_tokenizer(reader.manifest.training_state, directory)


def _task_info(training_state: Mapping[str, Any]) -> Mapping[str, Any]:
    task = training_state.get("task")
    return task if isinstance(task, Mapping) else {}


def _buffers(
    config: Mapping[str, Any], training_state: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Those of a pretrained model that lie in its directory. With seeded weights transformers makes
    the same as the run did."""
    path = _task_info(training_state).get("pretrained")
    if not isinstance(path, str):
        return {}
    model = build_on_meta(config)
    if not (buffers := saved_buffers(model)):
        return {}
    try:
        PretrainedWeights(path, model).fill(buffers)
    except ConfigError as error:
        raise ExchangeError(
            path, f"the model's buffers cannot be read there: {error.fact}", "Put it back"
        ) from error
    return buffers


def _whole(reader: Reader, name: str) -> TensorSlice:
    shape, dtype = reader.manifest.tensors[PARAMETERS + name]
    return TensorSlice(name, shape, dtype, (0,) * len(shape), shape)


def _write_shard(reader: Reader, file: Path, parts: Sequence[TensorSlice]) -> None:
    with file.open("xb") as out:
        out.write(header(parts))
        for part in parts:
            for data in _stream(reader, part):
                out.write(data)


def _stream(reader: Reader, part: TensorSlice) -> Iterator[memoryview]:
    for box in pieces_of(PARAMETERS + part.name, part.sizes, item_bytes(part.dtype)):
        yield raw_bytes(reader.read(*box))


def _finished_config(config: Mapping[str, Any], parts: Sequence[TensorSlice]) -> dict[str, Any]:
    """The configuration as transformers would save it beside these weights."""
    largest = max(parts, key=lambda part: math.prod(part.sizes))
    # `use_cache` is off for training only; left out, the architecture's own default holds.
    kept = {key: value for key, value in config.items() if key not in ("use_cache", "torch_dtype")}
    if not kept.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config["model_type"]))
        kept["architectures"] = [known] if isinstance(known, str) else None
    return {**kept, "dtype": largest.dtype}


def _copy_tokenizer(training_state: Mapping[str, Any], directory: Path) -> list[str]:
    task = _task_info(training_state)
    path = task.get("tokenizer")
    if not isinstance(path, str):
        return ["No tokenizer was written: the checkpoint names none."]
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        return [f"No tokenizer was written: {path} cannot be read ({error})."]
    tokenizer.save(str(directory / "tokenizer.json"))
    source = task.get("tokenizer_from")
    remarks = [] if source is None else _copy_tokenizer_settings(Path(source), directory)
    if (directory / "tokenizer_config.json").exists():
        return remarks
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        settings["eos_token"] = END_OF_TEXT
    _write_json(directory / "tokenizer_config.json", settings)
    return remarks


def _copy_tokenizer_settings(source: Path, directory: Path) -> list[str]:
    """Special tokens and the chat template, from beside the tokenizer that the user gave."""
    place = source.expanduser()
    if not place.exists():
        return [f"The tokenizer's settings were not written: {source} is gone."]
    folder = place if place.is_dir() else place.parent
    for name in _TOKENIZER_SETTINGS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, directory / name)
    return []


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
