"""Pretrained weights: every box of every parameter, from one file and from shards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.errors import ConfigError
from trainer.models.pretrained import PretrainedWeights

FULL_SIZE = {"one": "1GB", "shards": "20KB"}


def tiny_llama(*, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module", params=list(FULL_SIZE))
def directory(
    request: pytest.FixtureRequest,
    model: LlamaForCausalLM,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path, max_shard_size=FULL_SIZE[request.param])
    sharded = (path / "model.safetensors.index.json").exists()
    assert sharded == (request.param == "shards")
    assert len(list(path.glob("*.safetensors"))) > 1 or not sharded
    return path


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_box_is_the_slice_of_the_parameter(
    directory: Path, model: LlamaForCausalLM, data: st.DataObject
) -> None:
    parameters = dict(model.named_parameters())
    name = data.draw(st.sampled_from(sorted(parameters)))
    shape = tuple(parameters[name].shape)
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    ends = tuple(data.draw(st.integers(o + 1, n)) for o, n in zip(starts, shape, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    found = PretrainedWeights(str(directory)).read(name, shape, starts, sizes)
    where = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
    assert torch.equal(found, parameters[name].detach()[where])


def test_all_parameters_of_the_same_architecture_are_there(
    directory: Path, model: LlamaForCausalLM
) -> None:
    PretrainedWeights(str(directory)).check_names(name for name, _ in model.named_parameters())


def test_missing_parameters_are_counted_and_the_first_is_named(directory: Path) -> None:
    with pytest.raises(ConfigError, match="2 parameters are not in its files, first 'bias'") as e:
        PretrainedWeights(str(directory)).check_names(["model.norm.weight", "scale", "bias"])
    assert (e.value.field, e.value.value) == ("train.task.model.path", str(directory))


def test_a_parameter_of_another_shape_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"is \(16,\) in the files and \(32,\) in the model"):
        PretrainedWeights(str(directory)).read("model.norm.weight", (32,), (0,), (8,))


def test_a_tied_parameter_is_stored_once_and_found(tmp_path: Path) -> None:
    model = tiny_llama(tied=True)
    model.save_pretrained(tmp_path)
    weights = PretrainedWeights(str(tmp_path))
    weights.check_names(name for name, _ in model.named_parameters())
    with pytest.raises(ConfigError, match=r"first 'lm_head\.weight'"):
        weights.check_names(["lm_head.weight"])


def test_stored_numbers_become_float32(tmp_path: Path) -> None:
    half = torch.arange(6.0).reshape(2, 3).bfloat16() / 3
    scalar = torch.tensor(2.5, dtype=torch.float16)
    save_file({"half": half, "scalar": scalar}, tmp_path / "model.safetensors")
    weights = PretrainedWeights(str(tmp_path))
    found = weights.read("half", (2, 3), (1, 0), (1, 2))
    assert found.dtype == torch.float32
    assert torch.equal(found, half[1:2, 0:2].float())
    value = weights.read("scalar", (), (), ())
    assert (value.item(), value.dtype) == (2.5, torch.float32)


@pytest.mark.parametrize("made", [False, True])
def test_a_directory_without_safetensors_is_refused(tmp_path: Path, made: bool) -> None:
    """A pickled file is not even looked at."""
    place = tmp_path / "model"
    if made:
        os.mkdir(place)
        torch.save({"weight": torch.zeros(2)}, place / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no model\.safetensors") as caught:
        PretrainedWeights(str(place))
    assert caught.value.field == "train.task.model.path"
