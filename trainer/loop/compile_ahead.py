"""The compilation of a model before its worker's first step: the others train meanwhile, and nobody
waits for it in a collective."""

from __future__ import annotations

import gc
import logging

import torch

from trainer.backend.groups import Device, without_peers
from trainer.backend.origin import lasting_device_error
from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.errors import describe
from trainer.loop.loader import read
from trainer.loop.samples import lane_ids
from trainer.parallel.layout import Slot
from trainer.tasks.task import PreparedTask

log = logging.getLogger(__name__)


def rehearse(
    task: PreparedTask, train: TrainConfig, *, lanes: int, max_replicas: int, device: Device
) -> None:
    """What a worker does before it has a place, and alone: builds its part of a replica, and sends
    a micro-batch through it. Its blocks are compiled then, into the node's cache, and its device
    has the kernels. What goes wrong here is told, and nothing comes of it: it comes again where
    the worker gets a place, unless the device has failed for good. The process may be in no group.
    The weights are 0, or with two levels anything.

    Args:
        task: what is learned.
        train: the settings of the run.
        lanes: of the run.
        max_replicas: see `Engine`.
        device: the worker's.

    Raises:
        torch.AcceleratorError: the device answers everything with it from now on.
    """
    try:
        with without_peers(train.parallel.dims, device) as mesh:
            slot = Slot(replica=0, rank=0, dims=train.parallel.dims)
            engine = Engine(
                task, train, slot=slot, mesh=mesh, device=device, max_replicas=max_replicas
            )
            compile_ahead(engine, lanes)
            del engine, mesh
    except BaseException as error:  # whatever the user's code raises
        if (lasting := lasting_device_error()) is not None:
            raise lasting from error
        log.warning("this worker's rehearsal has failed; it joins without: %s", describe(error))
    gc.collect()  # after a failure its traceback has held the model until now
    if device == "cuda":
        torch.cuda.empty_cache()  # NCCL, which comes next, has its memory from elsewhere


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
    engine.collect_in(engine.gradient)  # else they take as much again, which a step does not
    engine.backward(loss)
    engine.model.zero_grad(set_to_none=True)
    engine.gradient.zero_()
