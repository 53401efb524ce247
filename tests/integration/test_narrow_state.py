"""Parameters and moments in bfloat16: alike at any number of replicas, also with blocks gathered
ahead and lanes that wait on the host. A checkpoint of them goes into another layout, and out of the
run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointing import Box, Reader, open_store
from tests.support.data_plane import commit_save, full_parameters, make_engine, run_layout
from tests.support.tiny import tiny_task, tiny_train
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OptimizerConfig, ParallelConfig
from trainer.exchange.hf_export import export_hf

pytestmark = pytest.mark.slow

STEPS = 3
NARROW = OptimizerConfig(lr=1e-2, clip_norm=0.5, master_dtype="bfloat16", moment_dtype="bfloat16")


@pytest.fixture
def meet() -> Iterator[Rendezvous]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    leave_replica_group()


def test_bfloat16_state_goes_into_another_layout_and_out(
    text: Path, tmp_path: Path, meet: Rendezvous
) -> None:
    plain = tiny_train(text, shard=2, steps=STEPS, micro_batch=1, optimizer=NARROW)
    task = tiny_task(text).prepare(plain, str(tmp_path / "cache"))
    alone = run_layout(task, plain, replicas=1, lanes=2)
    ahead = replace(plain, gather_ahead=2, lane_buffers=1)
    workers = run_layout(task, ahead, replicas=2, lanes=2, saves=True)
    for rank, worker in enumerate(workers):
        same = alone[rank % 2]
        assert worker.losses == same.losses and worker.losses[-1] < worker.losses[0]
        assert all(torch.equal(t, same.local[name][2]) for name, (*_, t) in worker.local.items())

    store = open_store(tmp_path / "store")
    manifest = commit_save(workers, store, STEPS)
    assert {info.dtype for info in manifest.tensors.values()} == {"bfloat16"}
    reader, whole = Reader(store, manifest), replace(plain, parallel=ParallelConfig())
    engine, full = make_engine(0, meet, task, whole), full_parameters(workers[:2])
    parts = engine.state.to_read()
    values = reader.read_many([Box(part.name, part.offsets, part.sizes) for part in parts])
    found = {part.name: value for part, value in zip(parts, values, strict=True)}
    engine.load(found, optimizer_steps=STEPS)
    for name, tensor in engine.state.tensors().items():
        assert tensor.dtype == torch.bfloat16 and tensor.any(), name
        if name.startswith("param/"):
            assert torch.equal(tensor.float(), full[name.removeprefix("param/")]), name

    from transformers import AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(task.config))
    export_hf(reader, tmp_path / "hf", config_path=tmp_path / "config.json")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, param in loaded.named_parameters():
        assert param.dtype == torch.bfloat16 and torch.equal(param.float(), full[name]), name
