"""A run with parameters and moments in bfloat16 goes through a kill, a heal and into another layout
with the same bits, and its weights out of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointing import Keys, Reader, newest, open_store
from tests.support.tiny import fit, tiny_trainer
from trainer.config import OptimizerConfig
from trainer.exchange.hf_export import export_hf

pytestmark = pytest.mark.slow

STEPS, MORE, KILL = 16, 20, 8
NARROW = OptimizerConfig(
    lr=1e-2, warmup_steps=2, clip_norm=0.5, master_dtype="bfloat16", moment_dtype="bfloat16"
)


def test_bfloat16_state_heals_resumes_and_is_exported(
    cluster: None, text: Path, tmp_path: Path
) -> None:
    whole = fit(tiny_trainer(text, tmp_path / "whole", shard=2, optimizer=NARROW, steps=STEPS))
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            shard=2,
            optimizer=NARROW,
            steps=STEPS,
            min_replicas=2,
            spares=2,
            faults=f"kill@{KILL}:1",
            gather_ahead=2,
            lane_buffers=1,
        )
    )
    assert broken.report["faults_fired"] == 1 and broken.report["lost_steps"] == 0
    assert broken.report["replicas_equal"] is True
    assert (broken.params, broken.losses) == (whole.params, whole.losses)
    assert whole.losses[-1] < whole.losses[0]

    moved = fit(
        tiny_trainer(text, tmp_path, shard=1, tensor=2, optimizer=NARROW, steps=MORE, replicas=1)
    )
    assert moved.losses[:STEPS] == whole.losses and len(moved.losses) == MORE
    store = open_store(tmp_path / "run" / "checkpoints")
    manifest = newest(store, Keys())
    assert manifest is not None
    assert {info.dtype for info in manifest.tensors.values()} == {"bfloat16"}

    from transformers import AutoModelForCausalLM

    reader = Reader(store, manifest)
    export_hf(reader, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    for name, param in loaded.named_parameters():
        info = manifest.tensors[f"param/{name}"]
        kept = reader.read(f"param/{name}", (0,) * len(info.shape), info.shape)
        assert torch.equal(param, kept), name
