"""Weights that a directory holds under other names or in parts: what transformers has saved is read
back, box by box."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.errors import ConfigError
from trainer.models.hf import ModelConfig, build_on_meta, weights
from trainer.models.pretrained import PretrainedWeights

EXPERTS = 11
"""So many that their numbers are not in the order of the alphabet."""

SIZE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8},
    "olmoe": {"num_experts": EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
}


def made(architecture: str, **settings: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **settings)
    )
    return model


def names(directory: Path) -> set[str]:
    return {name for file in directory.glob("*.safetensors") for name in load_file(file)}


def on_meta(directory: Path) -> nn.Module:
    return build_on_meta(ModelConfig(path=str(directory)).resolve(64))


@pytest.fixture(
    scope="module", params=[(name, size) for name in MIXTURES for size in ("1GB", "9KB")]
)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    architecture, shard = request.param
    directory = tmp_path_factory.mktemp(architecture)
    model = made(architecture, **SIZE, **MIXTURES[architecture])
    model.save_pretrained(directory, max_shard_size=shard)
    assert (len(list(directory.glob("*.safetensors"))) > 3) == (shard == "9KB")
    return model, directory


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_box_of_a_mixture_is_the_slice_of_the_parameter(
    saved: tuple[PreTrainedModel, Path], data: st.DataObject
) -> None:
    model, directory = saved
    parameters = dict(model.named_parameters())
    fused = [name for name in parameters if name.endswith("experts.gate_up_proj")]
    assert fused and not set(fused) & names(directory)
    name = data.draw(st.sampled_from([*fused, *parameters]))
    shape = tuple(parameters[name].shape)
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    where = tuple(slice(start, stop) for start, stop in bounds)
    offsets = tuple(start for start, _ in bounds)
    sizes = tuple(stop - start for start, stop in bounds)
    found = PretrainedWeights(str(directory), model).read(name, shape, offsets, sizes)
    assert torch.equal(found, parameters[name].detach()[where])


def test_a_box_cuts_through_an_expert_and_across_gate_and_up(
    saved: tuple[PreTrainedModel, Path],
) -> None:
    model, directory = saved
    name = "model.layers.1.mlp.experts.gate_up_proj"
    parameter = model.get_parameter(name).detach()
    rows = parameter.shape[1]
    offsets, sizes = (1, rows // 2 - 3, 5), (EXPERTS - 1, 6, 4)
    found = PretrainedWeights(str(directory), model).read(
        name, tuple(parameter.shape), offsets, sizes
    )
    assert torch.equal(found, parameter[1:, rows // 2 - 3 : rows // 2 + 3, 5:9])


def test_a_mixture_starts_from_all_its_weights_and_buffers(
    saved: tuple[PreTrainedModel, Path],
) -> None:
    model, directory = saved
    built = on_meta(directory)
    source = weights({}, built, 0, str(directory))
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        found = source.read(name, shape, (0,) * len(shape), shape)
        assert torch.equal(found, parameter), name
    for name, buffer in model.named_buffers():
        assert torch.equal(built.get_buffer(name), buffer), name


@pytest.mark.parametrize("original", [True, False])
def test_a_mixture_under_its_names_in_memory_is_read_as_well(
    tmp_path: Path, original: bool
) -> None:
    model = made("mixtral", **SIZE, **MIXTURES["mixtral"])
    model.save_pretrained(tmp_path, save_original_format=original)
    name = "model.layers.0.mlp.experts.down_proj"
    assert (name in names(tmp_path)) != original
    shape = tuple(model.get_parameter(name).shape)
    found = weights({}, on_meta(tmp_path), 0, str(tmp_path)).read(name, shape, (0, 0, 0), shape)
    assert torch.equal(found, model.get_parameter(name))


def test_weights_of_the_model_without_its_head_are_found(tmp_path: Path) -> None:
    """GPT-2's on the Hub have no `transformer.` before their names."""
    model = made("gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=64)
    base: Any = model.base_model
    base.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    assert "wte.weight" in names(tmp_path)
    source = weights({}, on_meta(tmp_path), 0, str(tmp_path))
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        assert torch.equal(source.read(name, shape, (0,) * len(shape), shape), parameter), name


def test_a_name_of_the_model_is_not_taken_for_an_old_one(tmp_path: Path) -> None:
    """transformers reads `LayerNorm.gamma` as `LayerNorm.weight`, where the model has that."""
    model = nn.Module()
    model.LayerNorm = nn.Module()
    model.LayerNorm.gamma = nn.Parameter(torch.arange(3.0))
    save_file({"LayerNorm.gamma": torch.arange(3.0)}, tmp_path / "model.safetensors")
    source = weights({}, model, 0, str(tmp_path))
    assert source.read("LayerNorm.gamma", (3,), (1,), (2,)).tolist() == [1.0, 2.0]


def refusal(directory: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        weights({}, on_meta(directory), 0, str(directory))
    assert caught.value.field == "train.task.model.path"
    return caught.value


def test_experts_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    made("olmoe", **SIZE, **MIXTURES["olmoe"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.1.mlp.experts.3."
    down, up = expert + "down_proj.weight", expert + "up_proj.weight"
    save_file({name: t for name, t in tensors.items() if name != down}, file)
    assert f"down_proj is ({EXPERTS - 1}, 16, 24) in the files" in refusal(tmp_path).fact
    save_file({name: t for name, t in tensors.items() if name != up}, file)
    assert "gate_up_proj cannot be put together: its parts do not fit" in refusal(tmp_path).fact
    save_file({**tensors, down: torch.zeros(2, 2)}, file)
    assert "down_proj cannot be put together: its parts have several" in refusal(tmp_path).fact
    save_file({**tensors, down: tensors[down].to(torch.float8_e4m3fn)}, file)
    assert f"{down} is F8_E4M3 in the files" in refusal(tmp_path).fact


def test_a_form_that_is_not_read_here_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = made("hrm_text", **SIZE)
    model.save_pretrained(tmp_path)
    error = refusal(tmp_path)
    assert "in a form that is not read here (Chunk)" in error.fact
    assert "save_original_format=False" in error.fix
    model.save_pretrained(tmp_path, save_original_format=False)
    weights({}, on_meta(tmp_path), 0, str(tmp_path))
