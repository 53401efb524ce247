"""A run whose state went through another system's format ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointing import CheckpointConfig, Keys, Reader, load_manifest, open_store
from elastic import OptimizerConfig
from elastic.cli.main import main
from elastic.reporting.event_log import read_steps
from tests.support.tiny import tiny_train, tiny_trainer

pytestmark = pytest.mark.soak


def elastic(*arguments: object) -> None:
    assert main(["checkpoints", *map(str, arguments)]) == 0


def parameters(run: Path, step: int) -> dict[str, torch.Tensor]:
    store = open_store(run / "checkpoints")
    reader = Reader(store, load_manifest(store, Keys(), step))
    names = [name for name in reader.manifest.tensors if name.startswith("param/")]
    return {name.removeprefix("param/"): reader.read_full(name) for name in names}


def losses(run: Path) -> dict[int, float]:
    return {record.step: record.loss for record in read_steps(run / "steps.jsonl")}


def test_through_dcp_and_hugging_face(cluster: None, text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = CheckpointConfig(every_steps=6, keep_last=2)
    tiny_trainer(text, tmp_path, checkpoint=checkpoint).fit()
    final = parameters(tmp_path / "run", 12)

    elastic("export", tmp_path / "run", 6, tmp_path / "dcp", "--to", "dcp")
    elastic("import", tmp_path / "again", tmp_path / "dcp", "--from", "dcp")
    tiny_trainer(text, tmp_path, name="again", checkpoint=checkpoint).fit()
    resumed, whole = losses(tmp_path / "again"), losses(tmp_path / "run")
    assert resumed == {step: whole[step] for step in range(6, 12)}
    assert_equal(parameters(tmp_path / "again", 12), final)

    elastic("verify", tmp_path / "run", "newest")
    elastic("export", tmp_path / "run", "newest", tmp_path / "hf", "--to", "hf")
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_equal({name: param.detach() for name, param in model.named_parameters()}, final)

    elastic("import", tmp_path / "tuned", tmp_path / "hf", "--from", "hf", "--step", 12)
    train = tiny_train(text, steps=13, optimizer=OptimizerConfig(lr=1e-30))
    tiny_trainer(text, tmp_path, name="tuned", train=train).fit()  # a step too small to be seen
    assert losses(tmp_path / "tuned").keys() == {12}
    assert_equal(parameters(tmp_path / "tuned", 13), final)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []
