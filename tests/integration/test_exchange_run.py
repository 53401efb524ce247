"""A run whose state went through another system's format ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import fit, tiny_trainer, write_text

from checkpointing import CheckpointConfig, Keys, Reader, load_manifest, newest, open_store
from elastic.cli.main import main

pytestmark = pytest.mark.slow


def elastic(*arguments: object) -> None:
    assert main(["checkpoints", *map(str, arguments)]) == 0


def parameters(run: Path, step: int) -> dict[str, torch.Tensor]:
    store = open_store(run / "checkpoints")
    reader = Reader(store, load_manifest(store, Keys(), step))
    names = [name for name in reader.manifest.tensors if name.startswith("param/")]
    return {name.removeprefix("param/"): reader.read_full(name) for name in names}


def test_through_dcp_and_hugging_face(cluster: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = write_text(tmp_path / "text")
    checkpoint = CheckpointConfig(every_steps=6, keep_last=2)
    whole = fit(tiny_trainer(text, tmp_path, checkpoint=checkpoint))

    elastic("export", tmp_path / "run", 6, tmp_path / "dcp", "--to", "dcp")
    elastic("import", tmp_path / "again", tmp_path / "dcp", "--from", "dcp")
    resumed = fit(tiny_trainer(text, tmp_path, name="again", checkpoint=checkpoint))
    assert resumed.params == whole.params
    assert len(resumed.losses) == 6 and resumed.losses == whole.losses[6:]

    elastic("verify", tmp_path / "run", "newest")
    elastic("export", tmp_path / "run", "newest", tmp_path / "hf", "--to", "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    final = parameters(tmp_path / "run", 12)
    assert final.keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        assert torch.equal(param, final[name])

    elastic("import", tmp_path / "tuned", tmp_path / "hf", "--from", "hf", "--step", 12)
    fit_nothing_more = tiny_trainer(text, tmp_path, name="tuned", checkpoint=checkpoint)
    fit_nothing_more.fit()
    store = open_store(tmp_path / "tuned" / "checkpoints")
    manifest = newest(store, Keys())
    assert manifest is not None and manifest.step == 12
    for name, tensor in parameters(tmp_path / "tuned", 12).items():
        assert torch.equal(tensor, final[name])
