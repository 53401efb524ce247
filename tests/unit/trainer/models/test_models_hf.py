"""Hugging Face models by configuration or path, and what tensor parallelism asks of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.models.hf import ModelConfig, build_on_meta, check_positions, weights
from trainer.models.init import WeightSource
from trainer.parallel.check import check_tensor_parallel

TINY = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
}


def resolve(used: int = 300, **settings: Any) -> dict[str, Any]:
    return ModelConfig(settings={**TINY, **settings}).resolve(used)


def write_model(directory: Path, **settings: Any) -> str:
    config = {"model_type": "mistral", "vocab_size": 100, **TINY, **settings}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(("used", "vocab_size"), [(1, 64), (64, 64), (65, 128), (300, 320)])
def test_the_vocabulary_is_rounded_up_to_a_multiple_of_64(used: int, vocab_size: int) -> None:
    assert resolve(used)["vocab_size"] == vocab_size


def test_a_configuration_is_complete_and_plain() -> None:
    config = resolve(rope_theta=5e5)
    assert (config["model_type"], config["hidden_size"]) == ("llama", 48)
    assert config["rms_norm_eps"] == 1e-6  # a default of transformers' Llama
    assert config["use_cache"] is False
    assert json.loads(json.dumps(config))["num_hidden_layers"] == 2
    assert resolve(use_cache=True)["use_cache"] is True


def test_a_vocabulary_that_is_set_is_kept() -> None:
    assert resolve(300, vocab_size=301)["vocab_size"] == 301
    assert resolve(300, vocab_size=300)["vocab_size"] == 300


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="the tokenizer has 300 tokens") as caught:
        resolve(300, vocab_size=299)
    assert (caught.value.field, caught.value.value) == (
        "train.task.model.settings",
        "vocab_size = 299",
    )


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="transformer-9") as caught:
        ModelConfig(architecture="transformer-9").resolve(300)
    assert caught.value.field == "train.task.model.architecture"
    assert len(caught.value.fact) <= 200


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    quantized: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
    path = write_model(tmp_path, **quantized)
    with pytest.raises(ConfigError, match="the model is quantized") as caught:
        ModelConfig(path=path).resolve(100)
    assert (caught.value.field, caught.value.value) == ("train.task.model.path", path)
    with pytest.raises(ConfigError, match="the model is quantized") as caught:
        resolve(**quantized)
    assert caught.value.field == "train.task.model.settings"
    assert "quantization_config=None" in caught.value.fix
    model = ModelConfig(path=path, settings={"quantization_config": None})
    model.check_settings(model.resolve(100))
    assert "quantization_config" not in model.resolve(100)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"hidden_size": "a"}, "'hidden_size' expected int, got str"),
        ({"vocab_size": "a"}, "'vocab_size' expected int, got str"),
        ({"num_attention_heads": 5}, "(48) is not a multiple of the number of attention heads (5)"),
    ],
)
def test_settings_that_transformers_refuses_are_told_with_its_reason(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match="transformers refuses the configuration") as caught:
        resolve(**settings)
    assert (caught.value.field, caught.value.value) == ("train.task.model.architecture", "llama")
    assert told in caught.value.fact
    assert "\n" not in caught.value.fact


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("num_hiden_layers", "Use 'num_hidden_layers'"),
        ("zzz", "LlamaConfig"),
    ],
)
def test_a_setting_that_the_configuration_does_not_have_is_refused(key: str, fix: str) -> None:
    model = ModelConfig(settings={**TINY, key: 9})
    with pytest.raises(ConfigError, match="llama has no setting of this name") as caught:
        model.check_settings(model.resolve(300))
    assert (caught.value.field, caught.value.value) == ("train.task.model.settings", key)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("attn_implementation", "eager", "scaled_dot_product_attention"),
        ("dtype", "bfloat16", "train.precision"),
        ("torch_dtype", "bfloat16", "master_dtype"),
    ],
)
def test_a_setting_that_the_trainer_makes_itself_is_refused(
    tmp_path: Path, key: str, value: str, fix: str
) -> None:
    model = ModelConfig(settings={**TINY, key: value})
    with pytest.raises(ConfigError, match="nothing would read it") as caught:
        model.check_settings(model.resolve(300))
    assert (caught.value.field, caught.value.value) == ("train.task.model.settings", key)
    assert fix in caught.value.fix
    given = ModelConfig(path=write_model(tmp_path, **{key: value}))
    given.check_settings(given.resolve(100))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"tie_word_embeddings": True, "model_type": "llama", "use_cache": True}),
        ("gpt2", {"n_embd": 32, "num_hidden_layers": 2}),  # by either name
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
        ("gemma3_text", {"use_bidirectional_attention": False}),
    ],
)
def test_a_setting_by_any_of_its_names_is_taken(
    architecture: str, settings: dict[str, Any]
) -> None:
    model = ModelConfig(architecture=architecture, settings=settings)
    model.check_settings(model.resolve(300))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("llama", {"max_position_embeddings": 64}), ("gpt2", {"n_positions": 64})],
)
def test_a_sample_has_no_more_tokens_than_the_model_positions(
    architecture: str, settings: dict[str, Any]
) -> None:
    config = ModelConfig(architecture=architecture, settings=settings).resolve(300)
    check_positions(config, 64)
    with pytest.raises(ConfigError, match="the model has 64 positions") as caught:
        check_positions(config, 65)
    assert (caught.value.field, caught.value.value) == ("train.task.seq_len", 65)
    assert "64 or fewer" in caught.value.fix


def test_a_coefficient_of_the_router_loss_that_is_set_turns_it_on() -> None:
    def asked(**settings: Any) -> Any:
        return ModelConfig(architecture="mixtral", settings=settings).resolve(300)[
            "output_router_logits"
        ]

    assert asked() is False  # as in transformers
    assert asked(router_aux_loss_coef=0.1) is True
    assert asked(router_aux_loss_coef=0.1, output_router_logits=False) is False


def test_a_vocabulary_of_none_is_one_that_is_not_set() -> None:
    assert resolve(65, vocab_size=None)["vocab_size"] == 128


def test_a_directory_gives_the_configuration_and_settings_override_it(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    config = ModelConfig(path=path, settings={"num_hidden_layers": 1}).resolve(90)
    assert (config["model_type"], config["vocab_size"]) == ("mistral", 100)
    assert (config["hidden_size"], config["num_hidden_layers"]) == (48, 1)
    with pytest.raises(ConfigError, match="101 tokens"):
        ModelConfig(path=path).resolve(101)


@pytest.mark.parametrize(
    ("name", "fact"), [("missing", "no such directory"), (".", r"no config\.json")]
)
def test_a_directory_without_a_configuration_is_refused(
    tmp_path: Path, name: str, fact: str
) -> None:
    place = str(tmp_path / name)
    with pytest.raises(ConfigError, match=fact) as caught:
        ModelConfig(path=place).resolve(300)
    assert (caught.value.field, caught.value.value) == ("train.task.model.path", place)


@pytest.mark.parametrize(
    ("text", "told"), [("{", "not JSON"), ("[]", "names no model_type"), ("{}", "names no model")]
)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        ModelConfig(path=str(tmp_path)).resolve(64)
    assert caught.value.field == "train.task.model.path"
    assert caught.value.value == str(tmp_path / "config.json")


def test_a_model_is_built_without_memory_for_its_parameters() -> None:
    model = build_on_meta(resolve())
    assert all(param.is_meta and param.dtype == torch.float32 for param in model.parameters())
    buffers = dict(model.named_buffers())
    inverse = buffers["model.rotary_emb.inv_freq"]
    expected = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)  # rotary positions, RoFormer, 2021
    torch.testing.assert_close(inverse, expected)


def test_an_architecture_without_a_causal_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot build a causal language model") as caught:
        build_on_meta(ModelConfig(architecture="vit").resolve(64))
    assert (caught.value.field, caught.value.value) == ("train.task.model.architecture", "vit")
    assert "Unrecognized configuration class" in caught.value.fact


def test_nobody_is_asked_whether_to_run_the_code_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names a class of its own, and transformers has none for it."""
    asked = list[str]()

    def answer(text: str) -> str:
        asked.append(text)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    given = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match="contains custom code") as caught:
        build_on_meta(ModelConfig(path=str(tmp_path)).resolve(64))
    assert caught.value.field == "train.task.model.architecture" and not asked


@pytest.mark.parametrize(
    ("architecture", "settings", "told"),
    [
        ("gemma2", {}, "Gemma2ForCausalLM does not support an attention implementation"),
        ("llama", {"hidden_act": "bogus"}, "KeyError('bogus')"),
        ("llama", {"pad_token_id": 64}, "Padding_idx must be within num_embeddings"),
    ],
)
def test_a_model_that_transformers_cannot_build_is_told_with_its_reason(
    architecture: str, settings: dict[str, Any], told: str
) -> None:
    config = ModelConfig(architecture=architecture, settings={**TINY, **settings}).resolve(64)
    with pytest.raises(ConfigError) as caught:
        build_on_meta(config)
    assert (caught.value.field, caught.value.value) == (
        "train.task.model.architecture",
        architecture,
    )
    assert told in caught.value.fact
    assert len(caught.value.fact) <= 210


def test_seeded_weights_are_transformers_own() -> None:
    config = resolve(initializer_range=0.5)
    model = build_on_meta(config)
    source = weights(config, model, 0, None)
    shape = tuple(model.get_parameter("lm_head.weight").shape)
    head = source.read("lm_head.weight", shape, (0, 0), shape)
    assert head.std().item() == pytest.approx(0.5, rel=0.05)
    norm = source.read("model.norm.weight", (48,), (0,), (48,))
    assert torch.equal(norm, torch.ones(48))


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_bigcode", "mixtral"])
def test_seeded_weights_spread_as_those_that_transformers_makes(architecture: str) -> None:
    """GPT-2's blocks narrow the projections to the residual stream by depth, after their layers
    have set them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    size = TINY if architecture == "mixtral" else {"n_embd": 64, "n_layer": 8, "n_head": 4}
    config = ModelConfig(architecture=architecture, settings=size).resolve(300)
    source = weights(config, build_on_meta(config), 0, None)
    settings = dict(config)
    own = AutoConfig.for_model(settings.pop("model_type"), **settings)
    matrices = {
        name: param
        for name, param in AutoModelForCausalLM.from_config(own).named_parameters()
        if param.dim() > 1
    }
    if architecture != "mixtral":
        projections = [param for name, param in matrices.items() if name.endswith("c_proj.weight")]
        assert len(projections) == 2 * 8
        for param in projections:  # Radford et al., 2019: 1 / sqrt of the residual layers
            assert param.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.1)
    for name, param in matrices.items():
        shape = tuple(param.shape)
        found = source.read(name, shape, (0,) * len(shape), shape)
        assert found.std().item() == pytest.approx(param.std().item(), rel=0.1), name


def test_special_tokens_are_those_of_the_tokenizer_that_is_trained() -> None:
    """OLMo's padding is token 1, which is "!" there."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")

    def special(architecture: str, end_id: int | None, **settings: Any) -> list[int | None]:
        model = ModelConfig(architecture=architecture, settings={**TINY, **settings})
        config = model.resolve(300, end_id)
        return [config[name] for name in names]

    assert special("olmo", None) == [None, 50279, 1]
    assert special("olmo", 0) == [0, 0, None]
    assert special("olmo", 0, pad_token_id=5, eos_token_id=7) == [0, 7, 5]
    assert special("roberta", 0) == [0, 0, 1]
    config = ModelConfig(architecture="olmo", settings=TINY).resolve(300, 0)
    model: Any = build_on_meta(config)
    assert model.get_input_embeddings().padding_idx is None


def padded(padding: int) -> WeightSource:
    config = resolve(vocab_size=320, pad_token_id=padding)
    return weights(config, build_on_meta(config), 0, None)


@pytest.mark.parametrize("padding", [0, 7, 319])
@pytest.mark.parametrize(("start", "stop"), [(0, 320), (0, 1), (0, 8), (7, 9), (1, 7), (160, 320)])
def test_the_row_of_the_padding_token_is_zero_in_any_box(
    padding: int, start: int, stop: int
) -> None:
    box = ((start, 3), (stop - start, 40))
    found = padded(padding).read("model.embed_tokens.weight", (320, 48), *box)
    expected = seeded_rows()[start:stop, 3:43].clone()
    if start <= padding < stop:
        expected[padding - start] = 0
    assert torch.equal(found, expected)


@functools.cache
def seeded_rows() -> torch.Tensor:
    """The embeddings of the same model without a padding token: no row is zero."""
    config = resolve(vocab_size=320)
    source = weights(config, build_on_meta(config), 0, None)
    rows = source.read("model.embed_tokens.weight", (320, 48), (0, 0), (320, 48))
    assert rows.abs().amax(1).min() > 0
    return rows


@functools.cache
def llama() -> tuple[dict[str, Any], nn.Module]:
    config = resolve(vocab_size=384)
    return config, build_on_meta(config)


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_a_degree_that_divides_everything_is_accepted(degree: int) -> None:
    config, model = llama()
    check_tensor_parallel(config, model, degree, 24)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("num_attention_heads", 8),
        ("num_key_value_heads", 2),
        ("intermediate_size", 97),
        ("vocab_size", 385),
        ("seq_len", 25),
    ],
)
def test_every_dimension_must_divide(name: str, size: int) -> None:
    config, model = llama()
    seq_len = size if name == "seq_len" else 24
    given = {**config, name: size} if name != "seq_len" else config
    with pytest.raises(ConfigError, match=f"does not divide {name} = {size}") as caught:
        check_tensor_parallel(given, model, 3, seq_len)
    assert (caught.value.field, caught.value.value) == ("train.parallel.tensor", 3)
    check_tensor_parallel(given, model, 1, seq_len)


DIVISIBLE = {"num_key_value_heads": 2, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gemma", {"tie_word_embeddings": True}),
        ("granite", {"tie_word_embeddings": True}),
        ("olmo", {}),
        ("starcoder2", {"use_bias": True, "tie_word_embeddings": True}),
        ("phi", {}),
        ("gpt_neox", {}),
        ("gpt_neox", {"tie_word_embeddings": True}),
        ("nemotron", {}),
        ("hyperclovax", {"use_post_norm": True}),
    ],
)
def test_the_supported_families_can_be_split(architecture: str, settings: dict[str, Any]) -> None:
    given = {**TINY, **DIVISIBLE, **settings}
    config = ModelConfig(architecture=architecture, settings=given).resolve(64)
    model = build_on_meta(config)
    tied = len(dict(model.named_parameters(remove_duplicate=False))) - len(list(model.parameters()))
    assert tied == given["tie_word_embeddings"]
    check_tensor_parallel(config, model, 2, 16)


@pytest.mark.parametrize(
    ("architecture", "settings", "left_out"),
    [
        ("nanochat", {}, "model.layers.0.self_attn.q_norm, model.layers.0.self_attn.k_norm"),
        ("cohere", {"use_qk_norm": True}, "model.layers.0.self_attn.q_norm, "),
        ("phi", {"qk_layernorm": True}, "model.layers.0.self_attn.q_layernorm, "),
        ("doge", {}, "model.layers.0, model.layers.0.self_attn, .* and others"),
    ],
)
def test_a_model_with_modules_of_unknown_place_is_refused(
    architecture: str, settings: dict[str, Any], left_out: str
) -> None:
    given = {**TINY, **DIVISIBLE, **settings}
    config = ModelConfig(architecture=architecture, settings=given).resolve(64)
    model = build_on_meta(config)
    with pytest.raises(ConfigError, match=f"{architecture} cannot .* leaves out {left_out}") as e:
        check_tensor_parallel(config, model, 2, 16)
    assert (e.value.field, e.value.value) == ("train.parallel.tensor", 2)
    check_tensor_parallel(config, model, 1, 16)


@pytest.mark.parametrize(
    ("architecture", "settings", "value"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("phi", {"resid_pdrop": 0.5}, "resid_pdrop = 0.5"),
        ("starcoder2", {"embedding_dropout": 0.1}, "embedding_dropout = 0.1"),
        (
            "gpt_neox",
            {"attention_dropout": 0.1, "hidden_dropout": 0.2},
            "attention_dropout = 0.1, hidden_dropout = 0.2",
        ),
    ],
)
def test_dropout_is_refused_where_tensor_ranks_would_draw_the_same_mask(
    architecture: str, settings: dict[str, Any], value: str
) -> None:
    given = {**TINY, **DIVISIBLE, **settings}
    config = ModelConfig(architecture=architecture, settings=given).resolve(64)
    model = build_on_meta(config)
    with pytest.raises(ConfigError, match="would drop the same") as caught:
        check_tensor_parallel(config, model, 2, 16)
    assert sorted(caught.value.value.split(", ")) == sorted(value.split(", "))  # type: ignore[attr-defined]
    assert caught.value.field == "train.task.model.settings"
    assert "train.parallel.tensor = 1" in caught.value.fix
    check_tensor_parallel(config, model, 1, 16)


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2}, "transformers has no plan for it"),
        ("qwen3", {**TINY, "num_hidden_layers": 1}, "its plan uses replicated_with_grad_allreduce"),
    ],
)
def test_a_model_without_a_usable_plan_is_refused(
    architecture: str, settings: dict[str, Any], why: str
) -> None:
    config = ModelConfig(architecture=architecture, settings=settings).resolve(64)
    model = build_on_meta(config)
    with pytest.raises(ConfigError, match=f"{architecture} cannot be split .*{why}") as caught:
        check_tensor_parallel(config, model, 2, 16)
    assert caught.value.field == "train.parallel.tensor"
    check_tensor_parallel(config, model, 1, 16)
