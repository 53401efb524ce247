"""Transformer Engine's place in a model, with what stands in for the library on a CPU: calls fit
its recorded signatures, weights and gradients are the model's. Its kernels are not what is
tested."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small_llama import small_train
from tests.support.te_signatures import classes_in, signature_of
from tests.support.te_stand_in import STAND_INS, OnCpu
from trainer.config import TrainConfig
from trainer.dryrun.rank import dry_run
from trainer.engine.build import build_model
from trainer.errors import ConfigError
from trainer.float8.config import Float8
from trainer.models.hf import ModelConfig, build_on_meta
from trainer.models.init import FullWeights
from trainer.parallel.recompute import Recompute
from trainer.te import library
from trainer.te.config import TransformerEngine
from trainer.te.layers import TeLinear, TeRMSNorm

SETTINGS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What stands in for the library can be imported."""
    monkeypatch.syspath_prepend(STAND_INS)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def model_with(*converters: TransformerEngine, architecture: str = "llama", **more: Any) -> Any:
    config = ModelConfig(architecture=architecture, settings={**SETTINGS, **more}).resolve(64)
    model: Any = build_on_meta(config)
    for converter in converters:
        model, _ = converter.convert(model, FullWeights({}))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        generator = torch.Generator().manual_seed(7)
        for _, param in sorted(model.named_parameters()):
            param.normal_(0.0, 0.3, generator=generator)
    return model


def gradients(model: Any, tokens: int = 48) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients on so many tokens of two samples, or of one where they are odd."""
    samples = 2 - tokens % 2
    tokens_BS = torch.arange(tokens).view(samples, -1) % 64
    logits = model(input_ids=tokens_BS, use_cache=False).logits
    (logits * logits).mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_names_shapes_values_and_gradients_are_the_models(stand_in: None) -> None:
    """In float32, where rounding is some 1e-6; a weight in another's place would be off by all."""
    ours, plain = model_with(OnCpu()), model_with()
    assert list(ours.state_dict()) == list(plain.state_dict())
    kinds = {type(module) for module in ours.modules()}
    assert {TeLinear, TeRMSNorm} <= kinds and type(plain.model.norm) not in kinds
    (logits, grads), (expected, wanted) = gradients(ours), gradients(plain)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_checkpoint_crosses_over(stand_in: None) -> None:
    plain, ours = model_with(), model_with(OnCpu())
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(1.5)
    ours.load_state_dict(plain.state_dict(), strict=True)
    tokens = torch.arange(16).view(1, 16)
    outputs = [model(input_ids=tokens).logits for model in (plain, ours)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("recipe", "tokens"), [("current", 48), ("current", 21), ("block", 48)])
def test_in_8_bits_the_outputs_are_others_and_near(
    stand_in: None, recipe: library.Recipe, tokens: int
) -> None:
    """With a number of tokens that 16 does not divide, too: the library takes none."""
    (logits, grads), (expected, wanted) = (
        gradients(model_with(OnCpu(float8=recipe)), tokens),
        gradients(model_with(), tokens),
    )
    share = (logits - expected).norm() / expected.norm()
    assert 1e-3 < share < 0.2
    assert {name: grad.shape for name, grad in grads.items()} == {
        name: grad.shape for name, grad in wanted.items()
    }


@pytest.mark.parametrize(
    ("recipe", "name"), [("current", "Float8CurrentScaling"), ("block", "Float8BlockScaling")]
)
def test_a_recipe_is_the_librarys_of_its_name(
    stand_in: None, recipe: library.Recipe, name: str
) -> None:
    te: Any = library.load()
    with library.in_8_bits(recipe):
        assert [type(asked).__name__ for asked in te._recipes] == [name]


TRAIN = replace(small_train(), precision="bfloat16")


def refusal(train: TrainConfig, device: str | None) -> str:
    from trainer.dryrun.shape import prepare_shape

    with pytest.raises(ConfigError) as error:
        build_model(prepare_shape(train), train, None if device is None else torch.device(device))
    return str(error.value)


def with_te(converter: TransformerEngine, **changes: Any) -> TrainConfig:
    return replace(TRAIN, converters=(converter,), **changes)


def test_it_is_refused_without_the_library() -> None:
    assert "cannot be imported" in refusal(with_te(OnCpu()), "cpu")
    assert "-e '.[te]'" in refusal(with_te(OnCpu()), "cpu")


def test_the_driver_needs_no_library() -> None:
    from trainer.dryrun.shape import prepare_shape

    train = with_te(TransformerEngine())
    model, _ = build_model(prepare_shape(train), train)
    assert any(isinstance(module, TeLinear) for module in model.modules())


@pytest.mark.parametrize(
    "raised",
    [
        'RuntimeError("Found empty `transformer-engine` meta package installed")',
        'AssertionError("transformer-engine and transformer-engine-torch differ in version")',
    ],
)
def test_a_library_that_is_half_installed_is_refused_in_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: str
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = refusal(with_te(OnCpu()), "cpu")
    assert raised.split('"')[1] in said and "-e '.[te]'" in said


@pytest.mark.parametrize("version", ["2.17.1", "2.21.0", "1.13"])
def test_other_versions_are_refused(
    stand_in: None, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    import transformer_engine  # type: ignore[import-not-found]

    assert library.why_not("current") is None
    monkeypatch.setattr(transformer_engine, "__version__", version)
    assert version in (library.why_not("current") or "")


def test_a_gpu_that_cannot_is_refused(stand_in: None) -> None:
    said = refusal(with_te(OnCpu(float8="block")), "cpu")
    assert "cannot on this GPU: Device compute capability 9.0" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "float32"}, "for bfloat16"),
        ({"compile": "on"}, "cannot be compiled"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused_on_the_driver(
    changes: dict[str, Any], said: str
) -> None:
    assert said in refusal(with_te(TransformerEngine(), **changes), None)


def test_attention_stays_the_model_s() -> None:
    """Which kernels torch takes for it is ours to choose; the library took slow ones."""
    plain, ours = model_with(), model_with(TransformerEngine())
    assert ours.config._attn_implementation == plain.config._attn_implementation
    attention = type(plain.model.layers[0].self_attn)
    assert type(ours.model.layers[0].self_attn) is attention


def test_it_has_no_kernels_for_a_cpu() -> None:
    assert "no kernels for device 'cpu'" in refusal(with_te(TransformerEngine()), "cpu")


def test_other_models_are_refused() -> None:
    model = build_on_meta(ModelConfig(architecture="gpt2").resolve(64))
    with pytest.raises(ConfigError, match="gpt2 is none of llama, mistral"):
        TransformerEngine().convert(model, FullWeights({}))


class Doubled(nn.Linear):
    """A user's layer, with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_layers_that_another_converter_made_are_refused() -> None:
    """It would take their place, and with it what they compute."""
    said = "q_proj is a Float8Linear, of a converter before"
    assert said in refusal(replace(TRAIN, converters=(Float8(), TransformerEngine())), None)
    model = build_on_meta(ModelConfig(settings=SETTINGS).resolve(64))
    model.get_submodule("model.layers.1.mlp").up_proj = Doubled(32, 64, bias=False, device="meta")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj is a Doubled, of a converter"):
        TransformerEngine().convert(model, FullWeights({}))


def test_after_it_nothing_is_left_for_float8() -> None:
    said = refusal(replace(TRAIN, converters=(TransformerEngine(), Float8())), None)
    assert "q_proj is a TeLinear already" in said


def test_delayed_scaling_is_refused_with_the_reason() -> None:
    wrong: Any = "delayed"
    with pytest.raises(ConfigError, match="depends on the lanes that a replica was dealt"):
        TransformerEngine(float8=wrong)


@pytest.mark.parametrize(
    ("recipe", "tensor", "recompute"), [(None, 1, "selective"), ("current", 2, None)]
)
def test_a_dry_run_counts_it_as_torchs_layers(
    recipe: library.Recipe | None, tensor: int, recompute: Recompute | None
) -> None:
    """A norm keeps one activation more than the model's own, at most."""
    plain = small_train(precision="bfloat16", shard=2, tensor=tensor, recompute=recompute)
    ours = replace(plain, converters=(TransformerEngine(float8=recipe),))
    wanted, found = (dry_run(train, replicas=1, device="cuda") for train in (plain, ours))
    norms, activation = 9, 256 * 256 * 2 // tensor  # two samples of 128 tokens
    more = found.components["activations"] - wanted.components["activations"]
    assert 0 <= more <= norms * activation
    components = {**found.components, "activations": wanted.components["activations"]}
    assert replace(found, components=components) == wanted


def test_signatures_are_read_from_source() -> None:
    source = (
        "class A:\n    def f(self, x, y: int = 3, *, z, w=None, **more): ...\ndef g(q=1): ...\n"
    )
    assert signature_of(source, "A", "f") == [
        ["x", "POSITIONAL_OR_KEYWORD", False],
        ["y", "POSITIONAL_OR_KEYWORD", True],
        ["z", "KEYWORD_ONLY", False],
        ["w", "KEYWORD_ONLY", True],
        ["more", "VAR_KEYWORD", True],
    ]
    assert signature_of(source, None, "g") == [["q", "POSITIONAL_OR_KEYWORD", True]]
    assert classes_in(source) == ["A"]


def test_a_call_that_no_version_takes_is_seen(stand_in: None) -> None:
    te: Any = library.load()
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        te.Linear(16, 16, colour="red")


def test_weights_do_not_become_the_librarys(stand_in: None) -> None:
    """Its modules and what is lent to them stay out of the model's sight."""
    model = model_with(OnCpu())

    def parts() -> list[tuple[str, int]]:
        named = [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]
        return [(name, id(part)) for name, part in named]

    before = parts()
    gradients(model)
    assert parts() == before
