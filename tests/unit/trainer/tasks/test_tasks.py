"""Tasks: what `prepare` refuses, what it leaves, and what the workers build from it."""

from __future__ import annotations

import json
import platform
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from tests.support.tiny_checkpoint import FALCON_H1
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.data import DataConfig, TokensCorruptError
from trainer.engine.state import state_table
from trainer.errors import ConfigError, StorageNotSeenError
from trainer.models.hf import (
    ModelConfig,
    build_on_meta,
    find_differing,
    text_configuration,
)
from trainer.tasks import trial
from trainer.tasks.causal_lm import CausalLM, PreparedCausalLM
from trainer.tasks.custom import CustomTask
from trainer.tasks.task import default_cache_dir

SETTINGS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
SEQ_LEN = 8


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    for number in range(12):
        (directory / f"{number:02}.txt").write_text(f"{number} times {number} is {number**2}\n" * 3)
    return directory


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def prepared(texts: Path, cache: str) -> PreparedCausalLM:
    return prepare(task_for(texts), cache)


def task_for(
    texts: Path, *, model: dict[str, Any] | None = None, seq_len: int = SEQ_LEN, **data: Any
) -> CausalLM:
    given = {"paths": (str(texts),), "vocab_size": 300, "holdout": 0.2, **data}
    return CausalLM(
        data=DataConfig(**given),
        seq_len=seq_len,
        model=ModelConfig(**{"settings": SETTINGS, **(model or {})}),
    )


def prepare(task: Any, cache: str, **parallel: Any) -> Any:
    train = TrainConfig(
        task=task, steps=1, global_batch=1, parallel=ParallelConfig(**parallel), seed=3
    )
    return task.prepare(train, cache)


def refusal(task: Any, cache: str, **parallel: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        prepare(task, cache, **parallel)
    return caught.value


def test_a_prepared_task_says_what_it_holds(prepared: PreparedCausalLM) -> None:
    info = prepared.info
    assert json.loads(json.dumps(info)) == info
    assert info["vocab_size"] == Tokenizer.from_file(info["tokenizer"]).get_vocab_size() <= 300
    assert len(prepared.train_data()) == (info["train_tokens"] - 1) // SEQ_LEN
    held_out = prepared.eval_data()
    assert held_out is not None
    assert len(held_out) == (info["val_tokens"] - 1) // SEQ_LEN
    h, i, kv, v = 16, 32, 8, 320
    attention, mlp, norms = 2 * h * h + 2 * h * kv, 3 * h * i, 3 * h
    assert info["parameters"] == 2 * v * h + attention + mlp + norms
    assert info["model"]["model_type"] == "llama"
    assert info["texts"] == "joined"
    end = Tokenizer.from_file(info["tokenizer"]).token_to_id("<|endoftext|>")
    assert info["model"]["eos_token_id"] == info["model"]["bos_token_id"] == end == 0


@pytest.mark.parametrize("own", [{}, {"time_step_limit": (0.0, float("inf"))}])
def test_a_model_with_an_infinite_setting_can_be_recorded(
    texts: Path, cache: str, tmp_path: Path, prepared: PreparedCausalLM, own: dict[str, Any]
) -> None:
    """A checkpoint's record is JSON, which has no infinity; `time_step_limit` ends there."""
    config = FalconH1Config(vocab_size=320, **FALCON_H1)
    FalconH1ForCausalLM(config).save_pretrained(tmp_path)
    shutil.copy(prepared.info["tokenizer"], tmp_path / "tokenizer.json")
    model = {"path": str(tmp_path), "pretrained": True, "settings": own}
    task = prepare(task_for(texts, model=model), cache)
    kept = json.loads(json.dumps(task.info["model"], allow_nan=False))
    assert kept["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    for read in (kept, task.config):
        assert text_configuration(read).time_step_limit == (0.0, float("inf"))
    assert find_differing(kept, task.info["model"]) == {}


@pytest.mark.parametrize(("hidden_size", "fits"), [(320, True), (240, False)])
def test_heads_that_divide_the_hidden_size_are_held_against_a_gpus_kernel(
    texts: Path, hidden_size: int, fits: bool
) -> None:
    """GPT-NeoX, as many others, has no `head_dim`."""
    settings = {"hidden_size": hidden_size, "num_attention_heads": 20}
    task = task_for(texts, model={"architecture": "gpt_neox", "settings": settings})
    parallel = ParallelConfig(context=2)
    train = TrainConfig(task=task, steps=1, global_batch=1, parallel=parallel, precision="bfloat16")
    if fits:
        task.check_gpu(train)
    else:
        with pytest.raises(ConfigError, match="heads of 12"):
            task.check_gpu(train)


def test_a_worker_looks_at_the_files_of_tokens_when_it_starts_and_never_again(
    prepared: PreparedCausalLM, tmp_path: Path
) -> None:
    copies = [tmp_path / "train", tmp_path / "val"]
    for path, copy in zip([prepared.train_path, prepared.eval_path], copies, strict=True):
        shutil.copytree(path, copy)
    task = replace(prepared, train_path=str(copies[0]), eval_path=str(copies[1]))
    task.warm_up()
    for copy in copies:
        (copy / "index.json").unlink()
    held_out, expected = task.eval_data(), prepared.eval_data()
    assert len(task.train_data()) == len(prepared.train_data())
    assert held_out is not None and expected is not None and len(held_out) == len(expected)


def test_a_worker_without_its_tokens_hears_of_it_where_it_needs_them(
    prepared: PreparedCausalLM, tmp_path: Path
) -> None:
    task = replace(prepared, train_path=str(tmp_path / "none"))
    task.warm_up()
    with pytest.raises(TokensCorruptError, match=r"none/index\.json.* mounted on this machine"):
        task.train_data()


@pytest.mark.parametrize("lacking", ["train_path", "eval_path"])
def test_the_machine_that_does_not_see_the_tokens_is_named(
    prepared: PreparedCausalLM, tmp_path: Path, lacking: str
) -> None:
    prepared.open_tokens()
    nowhere: dict[str, Any] = {lacking: str(tmp_path / "none")}
    task = replace(prepared, **nowhere)
    named = (
        rf"^train\.task\.data = .* on machine {platform.node()}: .*none/index\.json.*\.cache_dir"
    )
    with pytest.raises(StorageNotSeenError, match=named):
        task.open_tokens()


def test_tokens_that_cannot_be_read_are_the_machine_s_affair_and_wrong_ones_are_not(
    prepared: PreparedCausalLM, tmp_path: Path
) -> None:
    """Those that are wrong may be so for all."""
    place = tmp_path / "tokens"
    shutil.copytree(prepared.train_path, place)
    task = replace(prepared, train_path=str(place))
    index = place / "index.json"
    text = index.read_text()
    index.unlink()
    index.mkdir()  # EISDIR, as a bad disk would give EIO
    with pytest.raises(StorageNotSeenError, match="the tokens cannot be read on machine"):
        task.open_tokens()
    index.rmdir()
    index.write_text(text)
    (place / "00000.bin").rename(place / "moved")
    with pytest.raises(StorageNotSeenError, match=r"on machine .*00000\.bin"):
        task.open_tokens()
    index.write_text(text.replace('"schema": 1', '"schema": 0'))
    with pytest.raises(TokensCorruptError, match="schema is 0"):
        task.open_tokens()


def test_workers_build_the_same_model(prepared: PreparedCausalLM) -> None:
    model, source = prepared.build(3)
    assert all(param.is_meta for param in model.parameters())
    for name, param in model.named_parameters():
        shape = tuple(param.shape)
        value = source.read(name, shape, (0,) * len(shape), shape)
        assert value.shape == shape
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_rotations_that_are_kept_are_those_of_transformers(
    texts: Path, cache: str, architecture: str
) -> None:
    """Up to the model's last position. Gemma 3 has a type for each type of layer."""
    dynamic = {"rope_type": "dynamic", "factor": 1.1, "rope_theta": 1e4}
    kinds = {"full_attention": dynamic, "sliding_attention": dynamic}
    settings = {
        **SETTINGS,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "max_position_embeddings": SEQ_LEN,
        "rope_parameters": dynamic if architecture == "llama" else kinds,
    }
    given = {"architecture": architecture, "settings": settings}
    prepared = prepare(task_for(texts, model=given), cache)
    built: Any = prepared.build(3)[0]
    own: Any = build_on_meta(prepared.config)
    place, x = torch.arange(SEQ_LEN)[None], torch.zeros(1, SEQ_LEN, 16)
    for kind in [()] if architecture == "llama" else [(name,) for name in kinds]:
        found, expected = (model.model.rotary_emb(x, place, *kind) for model in (built, own))
        assert all(map(torch.equal, found, expected))
    assert "dynamic" not in str(built.model.rotary_emb.rope_type)
    assert "dynamic" in str(own.model.rotary_emb.rope_type)


def test_the_loss_is_the_summed_cross_entropy_of_the_next_tokens(
    prepared: PreparedCausalLM,
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS))
    batch = prepared.train_data().batch(np.array([0, 2]))
    assert isinstance(batch, torch.Tensor)
    loss, count = prepared.loss(model, batch)
    assert count == 2 * SEQ_LEN
    assert loss.requires_grad
    probabilities = model(batch[:, :-1]).logits.softmax(-1)
    expected = sum(
        -probabilities[row, place, batch[row, place + 1]].log().item()
        for row in range(2)
        for place in range(SEQ_LEN)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_held_out_text_shorter_than_a_sample_is_no_held_out_data(texts: Path, cache: str) -> None:
    long = prepare(task_for(texts, holdout=0.2, seq_len=1), cache)
    seq_len = long.info["val_tokens"]
    assert seq_len < long.info["train_tokens"]
    assert prepare(task_for(texts, seq_len=seq_len), cache).eval_data() is None
    exact = prepare(task_for(texts, seq_len=seq_len - 1), cache).eval_data()
    assert exact is not None
    assert len(exact) == 1
    assert prepare(task_for(texts, holdout=0), cache).eval_data() is None


def test_evaluations_that_can_never_come_are_told(
    texts: Path, cache: str, prepared: PreparedCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    """By default there is one at the end: a run without is warned of, one that asks for more is
    refused."""
    seq_len = prepared.info["val_tokens"]
    for task, told in (
        (task_for(texts, seq_len=seq_len - 1), False),
        (task_for(texts, seq_len=seq_len), True),
    ):
        train = TrainConfig(task=task, steps=1, global_batch=1, seed=3)
        task.prepare(train, cache)
        said = f"{seq_len} tokens are held out, {seq_len + 1} needed for one sample"
        assert any(said in message for message in caplog.messages) == told
        often = replace(train, eval_every=5)
        if told:
            with pytest.raises(ConfigError, match=said) as refused:
                task.prepare(often, cache)
            assert (refused.value.field, refused.value.value) == ("train.eval_every", 5)
        else:
            task.prepare(often, cache)
    none = task_for(texts, seq_len=seq_len, holdout=0)
    none.prepare(replace(train, task=none, eval_every=5), cache)


@pytest.mark.parametrize("seq_len", [0, -1])
def test_a_sample_has_a_token(texts: Path, cache: str, seq_len: int) -> None:
    error = refusal(task_for(texts, seq_len=seq_len), cache)
    assert (error.field, error.value) == ("train.task.seq_len", seq_len)


def test_too_little_text_for_a_sample_is_refused(texts: Path, cache: str) -> None:
    long = {"settings": {**SETTINGS, "max_position_embeddings": 100_000}}
    error = refusal(task_for(texts, model=long, seq_len=100_000), cache)
    assert error.field == "train.task.data.paths"
    assert "100001 needed" in error.fact


def test_text_that_is_not_there_is_refused(texts: Path, cache: str) -> None:
    error = refusal(task_for(texts / "missing"), cache)
    assert (error.field, error.value) == ("train.task.data.paths", str(texts / "missing"))


def test_a_model_with_too_small_a_vocabulary_is_refused_before_text_is_read(
    texts: Path, tmp_path: Path
) -> None:
    model = {"settings": {**SETTINGS, "vocab_size": 299}}
    error = refusal(task_for(texts / "missing", model=model), str(tmp_path / "cache"))
    assert (error.field, error.value) == ("train.task.model.settings", "vocab_size = 299")
    assert not (tmp_path / "cache").exists()


def test_a_layout_that_does_not_go_with_the_model_is_refused_before_text_is_read(
    texts: Path, tmp_path: Path
) -> None:
    error = refusal(task_for(texts / "missing"), str(tmp_path), tensor=3)
    assert (error.field, error.value) == ("train.parallel.tensor", 3)


def test_a_given_tokenizer_must_fit_the_model(
    texts: Path, cache: str, prepared: PreparedCausalLM
) -> None:
    size = prepared.info["vocab_size"]
    settings = {**SETTINGS, "vocab_size": size - 1}
    tokenizer = prepared.info["tokenizer"]
    unread = task_for(texts / "missing", model={"settings": settings}, tokenizer=tokenizer)
    error = refusal(unread, cache)
    assert error.field == "train.task.model.settings"
    fitting = {"settings": {**SETTINGS, "vocab_size": size}}
    assert (
        prepare(task_for(texts, model=fitting, tokenizer=tokenizer), cache).info["vocab_size"]
        == size
    )


def test_a_model_without_a_vocabulary_size_gets_the_tokenizers(
    texts: Path, cache: str, prepared: PreparedCausalLM
) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "vocab_size"}
    task = task_for(texts, model={"settings": settings}, tokenizer=prepared.info["tokenizer"])
    used = prepared.info["vocab_size"]
    assert prepare(task, cache).config["vocab_size"] == (used + 63) // 64 * 64


@pytest.mark.parametrize("architecture", ["transformer-9", "vit"])
def test_an_architecture_that_is_no_language_model_is_refused(
    texts: Path, cache: str, architecture: str
) -> None:
    error = refusal(task_for(texts, model={"architecture": architecture, "settings": {}}), cache)
    assert (error.field, error.value) == ("train.task.model.architecture", architecture)


@pytest.mark.parametrize(
    ("degree", "seq_len", "name"), [(4, 8, "num_key_value_heads = 2"), (2, 7, "seq_len = 7")]
)
def test_a_tensor_degree_that_does_not_divide_is_refused(
    texts: Path, cache: str, degree: int, seq_len: int, name: str
) -> None:
    error = refusal(task_for(texts, seq_len=seq_len), cache, tensor=degree)
    assert (error.field, error.value) == ("train.parallel.tensor", degree)
    assert name in error.fact


def test_workers_that_would_leave_out_different_blocks_are_refused(texts: Path, cache: str) -> None:
    settings = {
        "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "word_embed_proj_dim": 16, "vocab_size": 320, "layerdrop": 0.1,
    }  # fmt: skip
    task = task_for(texts, model={"architecture": "opt", "settings": settings})
    error = refusal(task, cache, shard=2)
    assert (error.field, error.value) == ("train.task.model.settings", "layerdrop = 0.1")
    prepare(task, cache)


def test_an_encoder_is_refused_before_text_is_read(
    texts: Path, tmp_path: Path, prepared: PreparedCausalLM
) -> None:
    settings = {name: n for name, n in SETTINGS.items() if name != "num_key_value_heads"}
    del settings["vocab_size"]
    bert = {"architecture": "bert", "settings": settings}
    for tokenizer in (None, prepared.info["tokenizer"]):
        task = task_for(texts / "missing", model=bert, tokenizer=tokenizer)
        error = refusal(task, str(tmp_path / "c"))
        assert (error.field, error.value) == ("train.task.model.architecture", "bert")


def test_a_misspelled_setting_is_refused_before_text_is_read(texts: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "num_hiden_layers": 2}
    error = refusal(task_for(texts / "missing", model={"settings": settings}), str(tmp_path / "c"))
    assert (error.field, error.value) == ("train.task.model.settings", "num_hiden_layers")


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, num_key_value_heads = 3"),
        ({"intermediate_size": 0}, "model.layers.0.mlp.gate_proj.weight"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ],
)
def test_a_model_that_cannot_compute_or_learn_is_refused_before_text_is_read(
    texts: Path, tmp_path: Path, changes: dict[str, int], value: str
) -> None:
    model = {"settings": {**SETTINGS, **changes}}
    error = refusal(task_for(texts / "missing", model=model), str(tmp_path / "c"))
    assert error.field == "train.task.model.settings"
    assert value in str(error.value)


def test_a_sample_longer_than_the_model_is_refused_before_text_is_read(
    texts: Path, tmp_path: Path
) -> None:
    short = {"settings": {**SETTINGS, "max_position_embeddings": 16}}
    task = task_for(texts / "missing", model=short, seq_len=17)
    assert refusal(task, str(tmp_path / "c")).field == "train.task.seq_len"


MOE = {**SETTINGS, "num_local_experts": 4, "num_experts_per_tok": 2}


def moe_loss(
    texts: Path, cache: str, *, training: bool = True, **settings: Any
) -> tuple[float, float]:
    """Our loss of a mixture of experts, and transformers' own, a token."""
    model_config = {"architecture": "mixtral", "settings": {**MOE, **settings}}
    prepared = prepare(task_for(texts, model=model_config), cache)
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**{**MOE, **settings})).train(training)
    batch = prepared.train_data().batch(np.array([0, 2]))
    loss, count = prepared.loss(model, batch)
    assert loss.requires_grad and count == 2 * SEQ_LEN
    # transformers shifts the labels itself, so the last input has no target there.
    inputs, targets = batch[:, :-1], batch[:, 1:]
    output = model(input_ids=inputs)
    own = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    auxiliary = output.aux_loss if settings.get("output_router_logits") else 0.0
    return loss.item() / count, (own + settings.get("router_aux_loss_coef", 0.0) * auxiliary).item()


@pytest.mark.parametrize("training", [True, False])
def test_the_auxiliary_loss_of_a_router_counts_in_training(
    texts: Path, cache: str, training: bool
) -> None:
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    plain, without = moe_loss(texts, cache, training=training)
    assert plain == pytest.approx(without, rel=1e-5)
    balanced, expected = moe_loss(texts, cache, training=training, **asked)
    if training:
        assert balanced == pytest.approx(expected, rel=1e-5)
        assert balanced > plain + 0.1
    else:  # the validation loss stays the text's
        assert balanced == pytest.approx(plain, rel=1e-6)


def test_a_pretrained_model_brings_its_tokenizer(
    texts: Path, cache: str, tmp_path: Path, prepared: PreparedCausalLM
) -> None:
    LlamaForCausalLM(LlamaConfig(**SETTINGS)).save_pretrained(tmp_path)
    own = Tokenizer.from_file(prepared.info["tokenizer"])
    own.add_tokens(["times"])
    own.save(str(tmp_path / "tokenizer.json"))
    pretrained = {"path": str(tmp_path), "pretrained": True, "settings": {}}
    info = prepare(task_for(texts, model=pretrained), cache).info
    assert (info["tokenizer_from"], prepared.info["tokenizer_from"]) == (str(tmp_path), None)
    assert Tokenizer.from_file(info["tokenizer"]).get_vocab() == own.get_vocab()
    given = task_for(texts, model=pretrained, tokenizer=prepared.info["tokenizer"])
    assert "times" not in Tokenizer.from_file(prepare(given, cache).info["tokenizer"]).get_vocab()


def test_a_name_of_the_hub_is_no_directory(texts: Path, cache: str) -> None:
    for pretrained in (False, True):
        model = {"path": "meta-llama/Llama-3.1-8B", "pretrained": pretrained}
        error = refusal(task_for(texts, model=model), cache)
        assert (error.field, error.value) == ("train.task.model.path", model["path"])
        assert "hf download" in error.fix


def test_a_pretrained_model_without_a_tokenizer_is_refused(
    texts: Path, cache: str, tmp_path: Path
) -> None:
    """Another tokenizer's numbers mean nothing to its weights."""
    LlamaForCausalLM(LlamaConfig(**SETTINGS)).save_pretrained(tmp_path)
    pretrained = {"path": str(tmp_path), "pretrained": True, "settings": {}}
    error = refusal(task_for(texts, model=pretrained), cache)
    assert (error.field, error.value) == ("train.task.data.tokenizer", None)
    assert str(tmp_path) in error.fact


def test_pretrained_weights_need_a_path(texts: Path, tmp_path: Path) -> None:
    """Found before any text is read."""
    error = refusal(task_for(texts / "missing", model={"pretrained": True}), str(tmp_path / "c"))
    assert error.field == "train.task.model.pretrained"
    assert not (tmp_path / "c").exists()


def test_a_pretrained_model_needs_its_weights(
    texts: Path, cache: str, tmp_path: Path, prepared: PreparedCausalLM
) -> None:
    tokenizer = prepared.info["tokenizer"]
    given = {"path": str(tmp_path), "pretrained": True, "settings": {}}
    task = task_for(texts, model=given, tokenizer=tokenizer)
    assert "config.json" in refusal(task, cache).fact
    LlamaConfig(**SETTINGS).save_pretrained(tmp_path)
    error = refusal(task, cache)
    assert (error.field, error.value) == ("train.task.model.path", str(tmp_path))
    assert "safetensors" in error.fact
    LlamaForCausalLM(LlamaConfig(**{**SETTINGS, "tie_word_embeddings": True})).save_pretrained(
        tmp_path
    )
    untied = {"tie_word_embeddings": False}
    error = refusal(
        task_for(texts, model={**given, "settings": untied}, tokenizer=tokenizer),
        cache,
    )
    assert "first 'lm_head.weight'" in error.fact


def test_pretrained_weights_of_another_size_are_refused(
    texts: Path, cache: str, tmp_path: Path, prepared: PreparedCausalLM
) -> None:
    LlamaForCausalLM(LlamaConfig(**SETTINGS)).save_pretrained(tmp_path)
    wider = {"path": str(tmp_path), "pretrained": True, "settings": {"hidden_size": 32}}
    error = refusal(task_for(texts, model=wider, tokenizer=prepared.info["tokenizer"]), cache)
    assert (error.field, error.value) == ("train.task.model.path", str(tmp_path))
    assert "is (320, 16) in the files and (320, 32) in the model" in error.fact


def test_a_pretrained_model_starts_from_its_weights(
    texts: Path, cache: str, tmp_path: Path, prepared: PreparedCausalLM
) -> None:
    saved = LlamaForCausalLM(LlamaConfig(**SETTINGS))
    saved.save_pretrained(tmp_path)
    given = {"path": str(tmp_path), "pretrained": True, "settings": {}}
    task = task_for(texts, model=given, tokenizer=prepared.info["tokenizer"])
    made = prepare(task, cache)
    assert made.config["eos_token_id"] == 2  # Llama's tokenizer's, for all that is known
    model, source = made.build(3)
    name = "model.layers.0.self_attn.k_proj.weight"
    shape = tuple(model.get_parameter(name).shape)
    assert torch.equal(source.read(name, shape, (2, 0), (3, 16)), saved.get_parameter(name)[2:5])


class Noisy(nn.Module):
    """Draws random numbers on the way to its parameters, and has a buffer of its own."""

    def __init__(self, *, trainable: bool = True) -> None:
        super().__init__()
        torch.rand(7)
        self.linear = nn.Linear(3, 2)
        self.linear.requires_grad_(trainable)
        self.norm = nn.BatchNorm1d(2)
        self.norm.requires_grad_(trainable)
        self.norm.get_buffer("running_mean").fill_(0.5)


def summed_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model.get_submodule("linear")(batch).sum(), len(batch)


def custom(**changes: Any) -> CustomTask:
    samples = [torch.full((3,), float(number)) for number in range(5)]
    given = {"build_model": Noisy, "loss_function": summed_loss, "dataset": samples, **changes}
    return CustomTask(**given)


def test_a_custom_task_is_its_own_preparation(tmp_path: Path) -> None:
    task = custom(info={"name": "mine"}, build_model=lambda: nn.Linear(3, 2))
    assert prepare(task, str(tmp_path), shard=2) is task
    assert list(tmp_path.iterdir()) == []


def test_running_statistics_and_other_formats_are_named(tmp_path: Path) -> None:
    stateful = refusal(custom(), str(tmp_path), tensor=1)
    assert (stateful.value, "running statistics" in stateful.fact) == ("norm", True)
    double = refusal(custom(build_model=lambda: nn.Linear(3, 2).double()), str(tmp_path), tensor=1)
    assert (double.value, "torch.float64" in double.fact) == ("weight", True)


BUILD = "train.task.build_model"


@pytest.mark.parametrize(
    ("changes", "tensor", "field"),
    [
        ({"dataset": []}, 1, "train.task.dataset"),
        ({}, 2, "train.parallel.tensor"),
        ({"build_model": lambda: nn.Linear(3, 2).requires_grad_(False)}, 1, BUILD),
        ({"build_model": nn.ReLU}, 1, BUILD),
        ({"build_model": lambda: nn.Linear(3, 2).double()}, 1, BUILD),
        ({"build_model": Noisy}, 1, BUILD),
    ],
)
def test_a_custom_task_that_cannot_work_is_refused(
    tmp_path: Path, changes: dict[str, Any], tensor: int, field: str
) -> None:
    assert refusal(custom(**changes), str(tmp_path), tensor=tensor).field == field


def test_a_function_that_returns_no_model_is_told_of() -> None:
    def forgets() -> Any:
        nn.Linear(3, 2)

    task = custom(build_model=forgets)
    for call in (lambda: prepare(task, ""), lambda: task.build(3)):
        with pytest.raises(ConfigError, match=r"it returns NoneType, not an nn\.Module") as caught:
            call()
        assert caught.value.field == BUILD


def linear_with(number: float) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias[1] = number
    return model


def test_a_model_with_nan_in_a_weight_is_refused(tmp_path: Path) -> None:
    """Frozen or not. An infinity may be meant, as a gate that is shut."""
    for frozen in (False, True):
        broken = linear_with(float("nan"))
        broken.get_parameter("bias").requires_grad_(not frozen)
        error = refusal(custom(build_model=lambda made=broken: made), str(tmp_path))
        assert (error.field, error.value) == (BUILD, "bias")
        assert "1 of the 2 numbers in it are NaN" in error.fact
    prepare(custom(build_model=lambda: linear_with(-float("inf"))), str(tmp_path))


def test_evaluations_without_samples_are_refused(tmp_path: Path) -> None:
    """A tensor of samples, too: it has no truth value."""
    for held_out, told in ((None, True), ([], True), (torch.ones(2, 3), False)):
        task = custom(build_model=lambda: nn.Linear(3, 2), eval_dataset=held_out)
        train = TrainConfig(task=task, steps=9, global_batch=1)
        task.prepare(train, str(tmp_path))
        often = replace(train, eval_every=5)
        if told:
            with pytest.raises(ConfigError, match="nothing can be evaluated") as refused:
                task.prepare(often, str(tmp_path))
            assert (refused.value.field, refused.value.value) == ("train.eval_every", 5)
        else:
            task.prepare(often, str(tmp_path))


def test_a_custom_model_is_built_from_the_seed() -> None:
    torch.manual_seed(11)
    plain = dict(Noisy().named_parameters())
    model, source = custom().build(11)
    _, other = custom().build(12)
    assert [name for name, _ in model.named_parameters()] == list(plain)
    for name, param in model.named_parameters():
        assert param.is_meta
        shape = tuple(param.shape)
        box = ((0,) * len(shape), shape)
        assert torch.equal(source.read(name, shape, *box), plain[name])
    weight = ("linear.weight", (2, 3), (0, 0), (2, 3))
    assert not torch.equal(source.read(*weight), other.read(*weight))


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    custom().build(11)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_custom_model_keeps_its_buffers() -> None:
    model, _ = custom().build(0)
    buffers = dict(model.named_buffers())
    assert set(buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert buffers["norm.running_mean"].tolist() == [0.5, 0.5]
    assert set(model.state_dict()) == set(Noisy().state_dict())


def only_the_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def a_loss_a_sample(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(1), len(batch)


def the_wrong_way_round(model: nn.Module, batch: torch.Tensor) -> tuple[int, torch.Tensor]:
    return len(batch), model(batch).sum()


def a_number(model: nn.Module, batch: torch.Tensor) -> tuple[float, int]:
    return model(batch).sum().item(), len(batch)


def without_gradient(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum().detach(), len(batch)


def a_sum_of_weights(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    return model(batch).sum(), 12.7


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (only_the_loss, "Tensor"),
        (a_loss_a_sample, "shape (2,)"),
        (the_wrong_way_round, "int"),
        (a_number, "float"),
        (without_gradient, "no gradient"),
        (a_sum_of_weights, "its count is 12.7"),
    ],
)
def test_a_loss_that_is_no_sum_and_count_is_refused(tmp_path: Path, loss: Any, told: str) -> None:
    task = custom(build_model=lambda: nn.Linear(3, 2), loss_function=loss)
    error = refusal(task, str(tmp_path))
    assert error.field == "train.task.loss_function"
    assert told in error.fact and "sum" in error.fix


def test_a_loss_that_cannot_be_tried_here_is_left_to_the_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may need their device, their files, or a peer. What raises here is told of."""
    release = threading.Event()

    def raises(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        raise RuntimeError("no GPU")

    def waits(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        release.wait()
        return model(batch).sum(), len(batch)

    for loss in (raises, waits):
        task = custom(build_model=lambda: nn.Linear(3, 2), loss_function=loss)
        assert prepare(task, str(tmp_path)) is task
    release.set()
    (told,) = caplog.messages
    line = raises.__code__.co_firstlineno + 1
    where = f"(line {line} of {Path(__file__).name})"
    assert told.startswith(f"on this machine the loss raised RuntimeError: no GPU {where}. ")


def test_a_loss_that_raises_is_told_of_with_the_users_own_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it raises itself, or what it calls does, with samples of a wrong shape."""

    def misses(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        raise KeyError("x")

    def wide(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(torch.cat([batch, batch], dim=1)).sum(), len(batch)

    def leaves(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        raise SystemExit("no data")

    for loss, what in (
        (misses, "KeyError: 'x'"),
        (wide, "RuntimeError: mat1 and mat2 shapes"),
        (leaves, "SystemExit: no data"),
    ):
        caplog.clear()
        prepare(custom(build_model=lambda: nn.Linear(3, 2), loss_function=loss), str(tmp_path))
        (told,) = caplog.messages
        assert f"the loss raised {what}" in told
        assert f"(line {loss.__code__.co_firstlineno + 1} of {Path(__file__).name})" in told


def test_an_operator_without_a_deterministic_way_is_refused_unless_it_is_asked_for(
    tmp_path: Path,
) -> None:
    def puts(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        said = model(batch)
        return said.sum() + torch.zeros(2).put_(torch.tensor([0]), said[0, :1]).sum(), len(batch)

    task = custom(build_model=lambda: nn.Linear(3, 2), loss_function=puts)
    error = refusal(task, str(tmp_path))
    assert (error.field, error.value) == ("train.determinism", "strict")
    assert error.fact.endswith(": put_ does not have a deterministic implementation")
    assert not torch.are_deterministic_algorithms_enabled()
    fast = TrainConfig(task=task, steps=1, global_batch=1, determinism="fast")
    assert task.prepare(fast, str(tmp_path)) is task


class Averaging(nn.Linear):
    """Keeps a running mean of what it has seen."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__(3, 2)
        self.register_buffer("mean", torch.zeros(3), persistent=persistent)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.get_buffer("mean").lerp_(batch.mean(0), 0.5)
        return super().forward(batch)


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("build", "buffer"),
    [
        (lambda: Averaging(persistent=True), "mean"),
        (spectral, "parametrizations.weight.0._u"),
        (lambda: Averaging(persistent=False), None),
    ],
)
def test_state_in_buffers_is_refused(
    tmp_path: Path, build: Callable[[], nn.Module], buffer: str | None
) -> None:
    """A replica that is healed would begin its own anew, and compute other gradients."""
    samples = [torch.full((3,), number + 1.0) for number in range(5)]
    task = custom(build_model=build, dataset=samples, loss_function=lambda m, b: (m(b).sum(), 2))
    if buffer is None:
        assert prepare(task, str(tmp_path)) is task
    else:
        refused = refusal(task, str(tmp_path), tensor=1)
        assert (refused.value, "neither healed nor saved" in refused.fact) == (buffer, True)


def test_a_model_is_tried_as_workers_have_it(tmp_path: Path) -> None:
    """In eval mode a spectral norm does not move; on the workers it would."""
    task = custom(build_model=lambda: spectral().eval(), loss_function=lambda m, b: (m(b).sum(), 2))
    refused = refusal(task, str(tmp_path), tensor=1)
    assert refused.value == "parametrizations.weight.0._u"


class Pair(nn.Module):
    """A student, and a frozen teacher that begins as its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())


def follows(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The average begins as what it is of: it is written to, and its bits stay."""
    with torch.no_grad():
        model.teacher.weight.copy_(model.student.weight)
    return model.student(batch).sum(), len(batch)


def follows_unseen(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """By `data` torch counts no write."""
    model.teacher.weight.data.mul_(0.9).add_(model.student.weight.data, alpha=0.2)
    return model.student(batch).sum(), len(batch)


def replaces(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    model.teacher.weight.data = model.teacher.weight.data * 0.9
    return model.student(batch).sum(), len(batch)


def normalises(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    with torch.no_grad():
        model.student.weight.copy_(nn.functional.normalize(model.student.weight))
    return model.student(batch).sum(), len(batch)


@pytest.mark.parametrize(
    ("loss", "changed"),
    [
        (follows, "teacher.weight"),
        (follows_unseen, "teacher.weight"),
        (replaces, "teacher.weight"),
        (normalises, "student.weight"),
    ],
)
def test_a_loss_that_changes_a_parameter_is_refused(
    tmp_path: Path, loss: Any, changed: str
) -> None:
    """A witness would change it once more, and a sound replica be called corrupt."""
    error = refusal(custom(build_model=Pair, loss_function=loss), str(tmp_path))
    assert (error.field, error.value) == ("train.task.build_model", changed)
    assert "changes this parameter" in error.fact and "optimizer alone" in error.fix


class Drawing:
    """Samples that `draw` makes by the index."""

    def __init__(self, draw: Callable[[int], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), self.draw(index))


def places() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tolist(), numpys[2]


def seeded(index: int) -> float:
    random.seed(index)
    np.random.seed(index)
    return random.random() + np.random.rand()


def of_its_own(index: int) -> float:
    return random.Random(index).random() + np.random.default_rng(index).random()


def seldom(index: int) -> float:
    """Most items are what they were, too, when they are read again."""
    return float(random.random() < 0.01)


def masks(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum() * random.random(), len(batch)


def plain(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(), len(batch)


@pytest.mark.parametrize(
    ("draw", "loss", "field", "whose", "refused"),
    [
        (lambda index: np.random.rand(), plain, "train.task.dataset", "NumPy", True),
        (seldom, plain, "train.task.dataset", "Python", False),
        (float, masks, "train.task.loss_function", "Python", True),
        (seeded, masks, "train.task.loss_function", "Python", True),
        (seeded, plain, None, "", False),
        (of_its_own, plain, None, "", False),
        (lambda index: torch.rand(()).item(), plain, None, "", False),
    ],
    ids=["numpy", "seldom", "loss", "loss after seeded items", "seeded", "own", "torch"],
)
def test_numbers_that_nobody_seeds_are_refused_in_strict(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    draw: Callable[[int], float],
    loss: Any,
    field: str | None,
    whose: str,
    refused: bool,
) -> None:
    """Where the loss depends on them. A library may draw the name of a file."""
    task = custom(build_model=lambda: nn.Linear(3, 2), dataset=Drawing(draw), loss_function=loss)
    before = places()
    fast = TrainConfig(task=task, steps=1, global_batch=1, determinism="fast")
    assert task.prepare(fast, str(tmp_path)) is task
    told = list(caplog.messages)
    assert [one.startswith(f"{field} = ") and whose in one for one in told] == [True] * bool(field)
    if refused:
        error = refusal(task, str(tmp_path))
        assert error.field == field
        assert error.fact.startswith(f"it draws from {whose}'s generator")
    else:
        assert prepare(task, str(tmp_path)) is task
        assert len(caplog.messages) == 2 * len(told)
    assert places() == before


def test_trying_the_loss_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    def noisy(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(batch) * torch.rand(())).sum(), len(batch)

    before = torch.get_rng_state()
    prepare(custom(build_model=lambda: nn.Linear(3, 2), loss_function=noisy), str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_that_takes_long_leaves_the_generators_alone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_LONGEST_S", 0.1)
    go_on, loss_asked = threading.Event(), threading.Event()

    class Slow(Drawing):
        def __getitem__(self, index: int) -> torch.Tensor:
            go_on.wait()
            return torch.zeros(3)

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss_asked.set()
        return plain(model, batch)

    before = places()
    task = custom(build_model=lambda: nn.Linear(3, 2), dataset=Slow(float), loss_function=loss)
    assert prepare(task, str(tmp_path)) is task
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "try-loss":
            thread.join()
    assert not loss_asked.is_set() and places() == before


class Shared(nn.Module):
    """One matrix under three names, two names of one buffer, and a recurrent layer, which keeps a
    list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.outer = self.first.weight
        self.recurrent = nn.GRU(4, 4)
        self.register_buffer("table", torch.arange(2.0))
        self.register_buffer("again", self.get_buffer("table"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.second(self.first(x)))[0] @ self.outer


def test_a_custom_model_with_tied_parameters_keeps_them_tied() -> None:
    torch.manual_seed(11)
    plain = Shared()
    task = custom(build_model=Shared)
    assert prepare(task, "") is task
    model, source = task.build(11)
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    assert all(param.is_meta for _, param in model.named_parameters(remove_duplicate=False))
    assert model.first.weight is model.second.weight is model.outer
    for name, param in plain.named_parameters():
        shape = tuple(param.shape)
        assert torch.equal(source.read(name, shape, (0,) * len(shape), shape), param)
    assert model.table is model.again
    assert model.table.tolist() == [0, 1]
    assert model(torch.ones(3, 2, 4, device="meta")).shape == (3, 2, 4)
    table = state_table(task.build(0)[0], OptimizerConfig())
    assert {name.split("/", 1)[1] for name in table} == {
        name for name, _ in plain.named_parameters()
    }


def test_a_frozen_parameter_stays_frozen() -> None:
    model, _ = custom(build_model=lambda: nn.Sequential(Noisy(trainable=False), Noisy())).build(0)
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert frozen == {"0.linear.weight", "0.linear.bias", "0.norm.weight", "0.norm.bias"}


def test_a_custom_task_passes_on_its_loss_and_data() -> None:
    task = custom(eval_dataset=[torch.ones(3)])
    batch = task.train_data().batch(np.array([4, 1]))
    assert isinstance(batch, torch.Tensor)
    assert batch.tolist() == [[4.0] * 3, [1.0] * 3]
    model = Noisy()
    loss, count = task.loss(model, batch)
    assert count == 2
    assert torch.equal(loss, model.linear(batch).sum())
    held_out = task.eval_data()
    assert held_out is not None
    assert len(held_out) == 1
    assert custom().eval_data() is None


def test_the_table_of_a_state_names_shapes_and_types(prepared: PreparedCausalLM) -> None:
    def frozen_bias() -> nn.Module:
        model = nn.Linear(3, 2)
        model.bias.requires_grad_(False)
        return model

    assert state_table(custom(build_model=frozen_bias).build(0)[0], OptimizerConfig()) == {
        "param/weight": ((2, 3), "float32"),
        "exp_avg/weight": ((2, 3), "float32"),
        "exp_avg_sq/weight": ((2, 3), "float32"),
        "param/bias": ((2,), "float32"),
    }
    table = state_table(prepared.build(0)[0], OptimizerConfig())
    assert table["param/model.embed_tokens.weight"] == ((320, 16), "float32")
    assert sum(int(np.prod(s)) for s, _ in table.values()) == 3 * prepared.info["parameters"]
    half = custom(build_model=lambda: nn.Linear(3, 1).bfloat16())
    assert state_table(half.build(0)[0], OptimizerConfig())["param/bias"] == ((1,), "bfloat16")


def test_prepared_data_lies_beside_the_runs() -> None:
    assert default_cache_dir("/runs") == "/runs/.data"
