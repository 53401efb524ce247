"""A head that works on some tokens at a time: the same loss, and no logits of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from tests.support.gradients import fill_whole
from tests.support.tiny import SEQ_LEN, SETTINGS, tiny_task, tiny_train, write_text
from trainer.errors import ConfigError
from trainer.models import chunked_head
from trainer.models.chunked_head import PIECE_BYTES, chunk_head, sum_entropy, with_losses
from trainer.models.hf import ModelConfig, build_on_meta
from trainer.parallel.compiled import compile_function
from trainer.tasks.causal_lm import CausalLM

Train = Callable[..., list[WorkerResult]]

LANES, SAMPLES, CHUNK = 2, 4, 7
"""A chunk is no whole sample, and the last one is short."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny_task(write_text(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def trained(task: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains for two steps; the result of every worker."""
    cache = tmp_path_factory.mktemp("cache")

    @functools.cache
    def train(
        chunk: int | None, *, replicas: int = 1, recompute: Any = None, **degrees: int
    ) -> list[WorkerResult]:
        text = task.data.paths[0]
        mine = replace(task, loss_chunk=chunk)
        config = tiny_train(text, task=mine, steps=2, recompute=recompute, **degrees)  # type: ignore[arg-type]
        prepared = mine.prepare(config, str(cache))
        results = run_layout(prepared, config, replicas=replicas, lanes=LANES)
        assert all(isinstance(result, WorkerResult) for result in results), results
        return results

    return train


@pytest.mark.parametrize(
    "layout",
    [{}, {"shard": 2}, {"tensor": 2}, {"shard": 2, "tensor": 2}, {"recompute": "full"}],
    ids=str,
)
def test_it_trains_as_one_that_works_on_all_tokens(trained: Train, layout: dict[str, Any]) -> None:
    plain, chunked = trained(None, **layout), trained(CHUNK, **layout)
    for one, other in zip(plain, chunked, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=1e-6)
        assert other.norms == pytest.approx(one.norms, rel=1e-5)
        ((step, loss, tokens),), ((_, wanted, of),) = other.evaluations, one.evaluations
        assert (step, tokens) == (2, of)
        assert loss == pytest.approx(wanted, rel=1e-6)
    expected = full_parameters(plain)
    for name, value in full_parameters(chunked).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-4)


def test_the_bits_do_not_depend_on_the_number_of_replicas(trained: Train) -> None:
    (one,), two = trained(CHUNK), trained(CHUNK, replicas=2)
    for worker in two:
        assert worker.losses == one.losses
        for name, (_, _, value) in one.local.items():
            assert torch.equal(worker.local[name][2], value)


class Largest(TorchDispatchMode):
    """The most numbers in a result."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


def model_of(architecture: str = "llama", **settings: Any) -> Any:
    config = ModelConfig(architecture=architecture, settings={**SETTINGS, **settings}).resolve(300)
    torch.manual_seed(0)
    model: Any = build_on_meta(config)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return model


def test_logits_never_exist_whole() -> None:
    words = 8 * 320
    model, batch = model_of(vocab_size=words), torch.randint(300, (4 * SAMPLES, SEQ_LEN + 1))
    chunk_head(model, CHUNK)
    head = model.get_output_embeddings().weight.numel()
    whole = 4 * SAMPLES * SEQ_LEN * words
    with Largest() as seen:
        with_losses(model, batch[:, 1:], input_ids=batch[:, :-1]).logits.backward()
    assert head < whole / 2, "else the weight's gradient hides the logits"
    assert CHUNK * words <= seen.numbers <= head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_backward_the_entropy_takes_few_tokens_at_a_time(dtype: torch.dtype) -> None:
    """A piece of them; one, where its logits are more than that."""
    torch.manual_seed(0)
    for tokens, words, most in ((600, 2**16, PIECE_BYTES // 4), (3, 2**25, 2**25)):
        logits = torch.empty(tokens, words, dtype=dtype).normal_()
        targets = torch.randint(words, (tokens,))
        trained = sum_entropy(logits, targets)
        with torch.no_grad(), Largest() as seen:
            evaluated = sum_entropy(logits, targets)
        assert 0 < seen.numbers <= most < tokens * words / 2
        torch.testing.assert_close(evaluated, trained, rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_an_evaluation_has_the_loss_of_a_training_forward(
    task: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    mine = replace(task, loss_chunk=chunk)
    config = tiny_train(task.data.paths[0], task=mine)  # type: ignore[arg-type]
    prepared = mine.prepare(config, str(tmp_path))
    model = fill_whole(prepared, config)
    batch: Any = prepared.train_data().batch(np.arange(SAMPLES))
    trained, terms = prepared.loss(model, batch)
    monkeypatch.setattr(chunked_head, "PIECE_BYTES", 3 * 4 * prepared.config["vocab_size"])
    with torch.no_grad():
        evaluated, of = prepared.loss(model.eval(), batch)
    assert terms == of == SAMPLES * SEQ_LEN
    torch.testing.assert_close(evaluated, trained.detach(), rtol=1e-6, atol=0)


def test_a_loss_that_is_compiled_is_computed_again_in_backward() -> None:
    """By a backend that divides graphs as inductor does, and compiles nothing."""
    batch = torch.randint(300, (SAMPLES, SEQ_LEN + 1))
    compiled = compile_function("the loss", sum_entropy, required=True, backend="aot_eager")
    found = []
    for entropy in (sum_entropy, compiled):
        model = model_of()
        chunk_head(model, CHUNK, entropy)
        loss = with_losses(model, batch[:, 1:], input_ids=batch[:, :-1]).logits
        loss.backward()
        found.append((loss, [param.grad for param in model.parameters()]))
    torch.testing.assert_close(found[0], found[1])


def test_without_targets_there_are_logits() -> None:
    plain, model = model_of(), model_of()
    chunk_head(model, CHUNK)
    batch = torch.randint(300, (SAMPLES, SEQ_LEN))
    assert torch.equal(model(input_ids=batch).logits, plain(input_ids=batch).logits)


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = model_of("granite", logits_scaling=8.0)
    chunk_head(model, CHUNK)
    batch = torch.randint(300, (SAMPLES, SEQ_LEN + 1))
    with pytest.raises(ConfigError, match="changes its logits"):
        with_losses(model, batch[:, 1:], input_ids=batch[:, :-1])


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {}),
        ("gemma3_text", {"head_dim": 4, "final_logit_softcapping": 30.0}),
    ],
)
def test_that_a_model_changes_its_logits_is_found_before_anything_starts(
    task: CausalLM, architecture: str, settings: dict[str, Any]
) -> None:
    model = ModelConfig(architecture=architecture, settings={**SETTINGS, **settings})
    replace(task, model=model).check(300)
    with pytest.raises(ConfigError, match="changes its logits") as caught:
        replace(task, model=model, loss_chunk=CHUNK).check(300)
    assert (caught.value.field, caught.value.value) == ("train.task.loss_chunk", CHUNK)


@pytest.mark.parametrize("architecture", ["llama", "granite", "gemma3_text", "mixtral", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_leaves_its_logits_alone_is_taken(
    task: CausalLM, architecture: str, tied: bool
) -> None:
    sizes = {} if architecture == "gpt2" else SETTINGS
    settings = {**sizes, "tie_word_embeddings": tied}
    model = ModelConfig(architecture=architecture, settings=settings)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    replace(task, model=model, loss_chunk=CHUNK).check(300)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_first_loss_that_is_no_number_is_no_reason_to_refuse() -> None:
    """Nor to believe that all is well: what comes next says it."""
    plain, changing = model_of(), model_of("granite", logits_scaling=8.0)
    batch = torch.randint(300, (SAMPLES, SEQ_LEN + 1))
    for model in (plain, changing):
        chunk_head(model, CHUNK)
        norm = model.model.norm.weight
        with torch.no_grad():
            norm.fill_(torch.nan)
            loss = with_losses(model, batch[:, 1:], input_ids=batch[:, :-1]).logits
            assert loss.isnan()
            norm.fill_(1.0)
    with_losses(plain, batch[:, 1:], input_ids=batch[:, :-1])
    with pytest.raises(ConfigError, match="changes its logits"):
        with_losses(changing, batch[:, 1:], input_ids=batch[:, :-1])


def test_no_tokens_are_refused(task: CausalLM) -> None:
    bad = replace(task, loss_chunk=0)
    with pytest.raises(ConfigError, match=r"loss_chunk = 0"):
        bad.prepare(tiny_train(task.data.paths[0], task=bad), "")  # type: ignore[arg-type]
