"""The compilation of a new replica's model, before its first step: the others train meanwhile, and
nobody waits for it in a collective."""

from __future__ import annotations

from trainer.engine.engine import Engine
from trainer.loop.loader import read
from trainer.loop.samples import lane_ids


def compile_ahead(engine: Engine, lanes: int) -> None:
    """Sends a micro-batch through a model without state, forward and backward, and forgets what
    comes out. All workers of the replica call it.

    Args:
        engine: just built; its weights become 0.
        lanes: of the run.
    """
    train, data = engine.train_config, engine.task.train_data()
    engine.clear_weights()
    ids = lane_ids(train, lanes, len(data), 0, 0, engine.slot.shard)[: train.micro_samples(lanes)]
    loss, _ = engine.task.loss(engine.model, engine.take(read(data, ids)))
    engine.backward(loss)
    engine.model.zero_grad(set_to_none=True)
