"""The weights of a Hugging Face model directory as a checkpoint, with an optimizer that is new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from checkpointing import Keys, Manifest, Store, TensorSlice
from checkpointing.format.boxes import Index
from checkpointing.format.dtypes import item_bytes
from trainer.engine.names import PARAMETERS
from trainer.exchange.intake import Incoming, commit_incoming, fresh_moments
from trainer.exchange.pieces import pieces_of, read_config
from trainer.models.hf import ModelConfig, build_on_meta
from trainer.models.init import saved_buffers
from trainer.models.pretrained import PretrainedWeights


def import_hf(
    store: Store, keys: Keys, source: Path, *, step: int, moments: Sequence[str]
) -> tuple[Manifest, list[str]]:
    """Commits the weights in `source` as the checkpoint of `step`.

    Weights become float32. Only the model's parameters are taken, of tied ones a single copy.
    Buffers stay in `source`, which the checkpoint names.

    Args:
        store: where to.
        keys: names in the store.
        source: directory with config.json and safetensors weights.
        step: step at which a run goes on from them.
        moments: those of the run's optimizer.

    Returns:
        The checkpoint, and what the user should know, a sentence each.

    Raises:
        ExchangeError, ConfigError: `source` is not a whole model, or its architecture is unknown.
        CheckpointError: see `commit_incoming`.
    """
    config = read_config(source)
    model = build_on_meta(ModelConfig(path=str(source)).resolve(vocab_size=0))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    weights = PretrainedWeights(str(source), model)
    weights.check(shapes)
    buffers = weights.fill(saved_buffers(model))
    incoming = (
        item
        for name, shape in shapes.items()
        for item in (*_parameter(weights, name, shape), *fresh_moments(name, shape, moments))
    )
    state = {
        "optimizer_steps": 0,
        "imported": {"from": "hf", "path": str(source)},
        "task": {"model": config, "pretrained": str(source)},
    }
    remarks = [
        f"A checkpoint holds no buffers, of which the model has {len(buffers)} (first {name}): for "
        f"a run that goes on from it set ModelConfig(path={str(source)!r}, pretrained=True)."
        for name in buffers[:1]
    ]
    return commit_incoming(store, keys, incoming, step=step, training_state=state), remarks


def _parameter(weights: PretrainedWeights, name: str, shape: Index) -> Iterator[Incoming]:
    for box in pieces_of(name, shape, item_bytes("float32")):
        yield Incoming(
            part=TensorSlice(PARAMETERS + name, shape, "float32", box.offsets, box.sizes),
            read=partial(weights.read, name, shape, box.offsets, box.sizes),
        )
