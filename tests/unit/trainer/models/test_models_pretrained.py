"""Pretrained weights: every box of every parameter, from one file and from shards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.errors import ConfigError
from trainer.models import hf
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


def test_a_box_of_no_numbers_is_empty(directory: Path) -> None:
    weights = PretrainedWeights(str(directory))
    assert weights.read("model.norm.weight", (16,), (16,), (0,)).shape == (0,)
    assert weights.read("lm_head.weight", (64, 16), (64, 0), (0, 16)).shape == (0, 16)


def shapes_of(model: LlamaForCausalLM) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def refusal(directory: Path, shapes: dict[str, tuple[int, ...]]) -> str:
    """What is said of weights in `directory` that cannot be those of a model of `shapes`."""
    with pytest.raises(ConfigError) as caught:
        PretrainedWeights(str(directory)).check(shapes)
    assert (caught.value.field, caught.value.value) == ("train.task.model.path", str(directory))
    return caught.value.fact


def test_all_parameters_of_the_same_architecture_are_there(
    directory: Path, model: LlamaForCausalLM
) -> None:
    PretrainedWeights(str(directory)).check(shapes_of(model))


def test_missing_parameters_are_counted_and_the_first_is_named(directory: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (16,), "scale": (1,), "bias": (1,)}
    assert refusal(directory, shapes) == "2 parameters are not in it, first 'bias'"


@pytest.mark.parametrize("shape", [(32,), (16, 1), ()])
def test_a_parameter_of_another_shape_is_refused(
    directory: Path, model: LlamaForCausalLM, shape: tuple[int, ...]
) -> None:
    fact = refusal(directory, {**shapes_of(model), "model.norm.weight": shape})
    assert fact == f"model.norm.weight is (16,) in the files and {shape} in the model"


def test_a_shard_that_is_missing_or_cut_off_is_named(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, max_shard_size=FULL_SIZE["shards"])
    shard = next(tmp_path.glob("model-00002*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert f"{shard.name} cannot be read: " in refusal(tmp_path, shapes_of(model))
    shard.unlink()
    assert f"{shard.name} cannot be read: " in refusal(tmp_path, shapes_of(model))
    shard.write_bytes(whole)
    PretrainedWeights(str(tmp_path)).check(shapes_of(model))


def test_an_index_that_names_the_wrong_shard_is_refused(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, max_shard_size=FULL_SIZE["shards"])
    index = tmp_path / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    first, last = (
        entries["weight_map"][n] for n in ("model.embed_tokens.weight", "lm_head.weight")
    )
    assert first != last
    entries["weight_map"]["lm_head.weight"] = first
    index.write_text(json.dumps(entries))
    assert f"{first} cannot be read: " in refusal(tmp_path, shapes_of(model))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"junk"),
        ("model.safetensors", b""),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b"\xff"),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b"[]"),
        ("model.safetensors.index.json", b'{"weight_map": 3}'),
    ],
)
def test_a_file_that_is_no_weights_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path, {}).startswith(f"{name} cannot be read: ")


def test_a_tied_parameter_is_stored_once_and_found(tmp_path: Path) -> None:
    model = tiny_llama(tied=True)
    model.save_pretrained(tmp_path)
    weights = PretrainedWeights(str(tmp_path))
    weights.check(shapes_of(model))
    assert "first 'lm_head.weight'" in refusal(tmp_path, {"lm_head.weight": (64, 16)})


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


@pytest.mark.parametrize(
    ("dtype", "called"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8")]
)
def test_a_parameter_that_is_stored_in_codes_is_refused(
    tmp_path: Path, dtype: torch.dtype, called: str
) -> None:
    """The shape is the model's: only the format says that a scale belongs to it."""
    weight = torch.ones(2, 3).to(dtype)
    save_file({"a.weight": weight, "a.scale": torch.ones(())}, tmp_path / "model.safetensors")
    assert refusal(tmp_path, {"a.weight": (2, 3)}).startswith(f"a.weight is {called} in the files")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_parameter_that_is_stored_in_numbers_is_taken(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a.weight": torch.ones(2, 3, dtype=dtype)}, tmp_path / "model.safetensors")
    PretrainedWeights(str(tmp_path)).check({"a.weight": (2, 3)})


def test_a_buffer_may_hold_whole_numbers(tmp_path: Path) -> None:
    odd = 2**24 + 1  # no float32 is
    save_file({"steps": torch.tensor([0, odd])}, tmp_path / "model.safetensors")
    buffers = {"steps": torch.zeros(2, dtype=torch.int64)}
    assert PretrainedWeights(str(tmp_path)).fill(buffers) == ["steps"]
    assert buffers["steps"].tolist() == [0, odd]


def test_a_model_takes_the_buffers_that_it_would_save_from_the_files(tmp_path: Path) -> None:
    def with_buffers(*values: float) -> LlamaForCausalLM:
        model = tiny_llama()
        for name, value in zip(("kept", "lost", "new"), values, strict=False):
            model.model.register_buffer(name, torch.full((2,), value), persistent=name != "lost")
        return model

    with_buffers(0.5, 0.5).bfloat16().save_pretrained(tmp_path)
    model = with_buffers(1.0, 1.0, 1.0)
    hf.weights({}, model, 0, str(tmp_path))
    found = {name: model.model.get_buffer(name).tolist() for name in ("kept", "lost", "new")}
    assert found == {"kept": [0.5, 0.5], "lost": [1.0, 1.0], "new": [1.0, 1.0]}
    model.model.register_buffer("kept", torch.ones(3))
    with pytest.raises(ConfigError, match=r"kept is \(2,\) in the files"):
        hf.weights({}, model, 0, str(tmp_path))


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
