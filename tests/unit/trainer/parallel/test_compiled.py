"""Compiled blocks: one graph for all that are alike, the names that they had, and what happens to a
block that cannot be compiled. With inductor, in whole runs: tests/integration/test_compile.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn

from tests.support import layered_llama
from tests.support.counting_backend import Counting
from tests.support.layered_llama import LAYERS, VOCABULARY, loss_of
from trainer.backend.origin import origin_of
from trainer.config import TrainConfig
from trainer.engine.build import build_model
from trainer.errors import CompileError, CompilerFailed, ConfigError, describe
from trainer.models.family import HUGGING_FACE
from trainer.parallel import compiled as compiled_blocks
from trainer.parallel.compiled import (
    CACHE,
    compile_blocks,
    compile_function,
    compiled_by,
    keep_compiled,
    private_directory,
)
from trainer.parallel.recompute import recompute_blocks
from trainer.tasks.custom import CustomTask


@pytest.fixture
def backend() -> Iterator[Counting]:
    """With nothing compiled before or after."""
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def llama() -> nn.Module:
    """Always with the same weights."""
    torch.manual_seed(0)
    return layered_llama.llama()


def learn(model: nn.Module, samples: int = 2) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of a micro-batch."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(VOCABULARY, (samples, 17), generator=generator)
    model.zero_grad()
    loss, _ = loss_of(model, batch)
    if torch.is_grad_enabled():
        loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_blocks_that_are_alike_share_a_graph_and_compute_the_same(
    backend: Counting, recompute: Any
) -> None:
    plain, compiled = llama().train(), llama().train()
    blocks = HUGGING_FACE.blocks(compiled)
    if recompute is not None:
        recompute_blocks(compiled, blocks, recompute)
    compile_blocks(compiled, blocks, required=True, backend=backend)
    expected, found = learn(plain), learn(compiled)
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert (backend.graphs, backend.calls) == (1, LAYERS)


def test_a_model_that_is_built_anew_finds_its_graph(backend: Counting) -> None:
    """As a survivor's after a regroup."""
    for _ in range(3):
        model = llama().train()
        compile_blocks(model, HUGGING_FACE.blocks(model), required=True, backend=backend)
        learn(model)
    assert (backend.graphs, backend.calls) == (1, 3 * LAYERS)


def test_with_a_budget_it_finds_its_graph_too(backend: Counting) -> None:
    for budget, graphs in [(0.5, 1), (0.5, 1), (0.25, 2)]:
        model = llama().train()
        blocks = HUGGING_FACE.blocks(model)
        compile_blocks(model, blocks, required=True, budget=budget, backend=backend)
        learn(model)
        assert backend.graphs == graphs


def test_a_budget_keeps_less_and_computes_the_same(backend: Counting) -> None:
    """With the backend that divides graphs as inductor does, and compiles nothing."""
    found = {}
    for budget in (None, 0.1):
        model = llama().train()
        blocks = HUGGING_FACE.blocks(model)
        compile_blocks(
            model, blocks, required=True, budget=budget, backend="aot_eager_decomp_partition"
        )
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found[budget] = learn(model), sum(kept.values())
    (expected, all_bytes), (learned, some_bytes) = found.values()
    assert learned[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(learned[1], expected[1], strict=True))
    assert some_bytes < 0.6 * all_bytes


def test_evaluations_are_computed_as_they_are(backend: Counting) -> None:
    model = llama()
    compile_blocks(model, HUGGING_FACE.blocks(model), required=True, backend=backend)
    with torch.no_grad():
        learn(model.eval())
        learn(model.train())
    assert backend.graphs == 0


def test_another_shape_gets_a_graph_of_its_own(backend: Counting) -> None:
    """One for all shapes would depend on the order in which they came."""
    model = llama().train()
    compile_blocks(model, HUGGING_FACE.blocks(model), required=True, backend=backend)
    for samples, graphs in [(2, 1), (3, 2), (4, 3), (2, 3)]:
        learn(model, samples)
        assert backend.graphs == graphs


def test_names_stay_what_they_are(backend: Counting) -> None:
    plain, compiled = llama(), llama()
    compile_blocks(compiled, HUGGING_FACE.blocks(compiled), required=True, backend=backend)
    learn(compiled.train())
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in plain.named_modules()]


def test_a_function_is_compiled_where_gradients_are_wanted(
    backend: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def decide(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.sum() > 0 else x

    x = torch.ones(3)
    doubled = compile_function("the loss", double, required=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(doubled(x), 2 * x) and backend.graphs == 0
    assert torch.equal(doubled(x), 2 * x) and backend.graphs == 1
    decided = compile_function("the loss", decide, required=False, backend=backend)
    assert torch.equal(decided(x), 2 * x) and torch.equal(decided(-x), -x)
    assert backend.graphs == 1 and "the loss cannot be compiled" in caplog.text


class Deciding(nn.Module):
    """A block that looks at its numbers, which no graph can; with a limit, from so many samples
    on."""

    def __init__(self, from_samples: int = 0) -> None:
        super().__init__()
        self.linear, self.from_samples = nn.Linear(2, 2), from_samples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= self.from_samples and x.sum() > 0:
            x = 2 * x
        y: torch.Tensor = self.linear(x)
        return y


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(*blocks: nn.Module, backend: Any, required: bool = False) -> Stack:
    model = Stack(*blocks).train()
    compile_blocks(model, HUGGING_FACE.blocks(model), required=required, backend=backend)
    return model


def test_a_block_that_cannot_be_compiled_is_named_and_computed_as_it_is(
    backend: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    model = stack(nn.Sequential(nn.Linear(2, 2)), Deciding(), backend=backend)
    x = torch.ones(3, 2)
    with caplog.at_level(logging.WARNING):
        found, again = model(x), model(x)
    first: Any = model.blocks[0]
    second: Any = model.blocks[1]
    inner = first[0](x)
    expected = second.linear(2 * inner if inner.sum() > 0 else inner)
    assert torch.equal(found, expected) and torch.equal(again, expected)
    assert backend.graphs == 1
    told = [r.message for r in caplog.records if r.name == "trainer.parallel.compiled"]
    assert len(told) == 1 and "block blocks.1 cannot be compiled" in told[0]
    assert "branching" in told[0]


def test_such_a_block_stops_a_run_that_requires_it(backend: Counting) -> None:
    model = stack(Deciding(), backend=backend, required=True)
    with pytest.raises(CompileError, match=r"block blocks\.0 cannot be compiled: .*branching"):
        model(torch.ones(1, 2))


def test_a_block_that_has_been_compiled_never_falls_back(backend: Counting) -> None:
    """A worker that came later might not, and would have other bits."""
    model = stack(Deciding(from_samples=4), backend=backend)
    model(torch.ones(3, 2))
    with pytest.raises(CompileError, match=r"blocks\.0"):
        model(torch.ones(4, 2))


class Numbered(nn.Module):
    """A block that computes with its number, so that each is another graph of the same code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(2, 2), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.number
        return y


def test_many_blocks_may_each_need_a_graph(backend: Counting) -> None:
    """torch gives up after eight of the same code."""
    count = 12
    model = stack(*(Numbered(i + 2) for i in range(count)), backend=backend, required=True)
    model(torch.ones(1, 2))
    assert backend.graphs == count


def test_a_process_may_build_any_number_of_models(backend: Counting) -> None:
    """Whose graphs name their own groups, as those of tensor parallelism do. Survivors build theirs
    on a thread beside the steps."""
    limits = torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8)
    with limits, ThreadPoolExecutor(1) as beside:
        for built in range(6):
            numbered = [Numbered(3 * built + i + 2) for i in range(3)]
            model = beside.submit(stack, *numbered, backend=backend, required=True).result()
            model(torch.ones(1, 2))
            assert backend.graphs == 3 * (built + 1)


def test_a_thread_that_recomputes_may_have_as_many_graphs(backend: Counting) -> None:
    """On CUDA backward is on one of autograd's."""
    model = stack(nn.Sequential(nn.Linear(2, 2)), backend=backend, required=True)
    model(torch.ones(1, 2))
    with ThreadPoolExecutor(1) as autograd:
        for samples in range(2, 13):
            autograd.submit(model, torch.ones(samples, 2)).result()
    assert backend.graphs == 12


def test_shapes_without_end_stop_the_run(
    backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_blocks, "_most_graphs", 0)
    model = stack(nn.Sequential(nn.Linear(2, 2)), backend=backend)
    limit = torch._dynamo.config.patch(recompile_limit=8)
    with limit, pytest.raises(CompileError, match="keep its shapes the same"):
        for samples in range(1, 20):
            model(torch.ones(samples, 2))


def test_a_backend_that_fails_is_no_reason_to_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    """It is this machine's, and its peers would not. One error says which block, in few words; the
    log has all that torch says."""
    torch._dynamo.reset()

    def broken(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise OSError("no compiler here\nand more of it")

    model: Any = stack(nn.Sequential(nn.Linear(2, 2)), backend=broken)
    with pytest.raises(
        CompilerFailed, match=r"blocks\.0: OSError: no compiler here\. If"
    ) as failed:
        model(torch.ones(1, 2))
    assert origin_of(failed.value) == "compiler" and describe(failed.value) == str(failed.value)
    assert "and more of it" in caplog.text and "Traceback" in caplog.text
    with compiled_by(broken), pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        model(torch.ones(1, 2))


def test_a_model_without_blocks_is_refused() -> None:
    task = CustomTask(
        build_model=lambda: nn.Linear(2, 2),
        loss_function=lambda model, batch: (model(batch).sum(), 1),
        dataset=[torch.ones(2)],
    )
    train = TrainConfig(task=task, steps=1, global_batch=1, compile="on")
    with pytest.raises(ConfigError, match=r"train\.compile = 'on': the model has no ModuleList"):
        build_model(task.prepare(train, ""), train)


@pytest.mark.parametrize("value", ["yes", True, None])
def test_what_is_no_way_to_compile_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile"):
        TrainConfig(task=None, steps=1, global_batch=1, compile=value)


def test_what_is_compiled_lies_where_only_this_user_writes(tmp_path: Path) -> None:
    path = private_directory(tmp_path)
    assert path == private_directory(tmp_path) and path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o770)
    with pytest.raises(PermissionError, match="drwxrwx---"):
        private_directory(tmp_path)


def test_a_link_to_elsewhere_is_not_taken_for_it(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir(mode=0o700)
    path = private_directory(tmp_path)
    path.rmdir()
    path.symlink_to(there)
    with pytest.raises(PermissionError):
        private_directory(tmp_path)


def test_the_users_own_choice_of_a_directory_stays() -> None:
    environment = {CACHE: "/mine"}
    keep_compiled(environment, 1)
    assert environment == {CACHE: "/mine"}
    keep_compiled(environment := {}, 1)
    assert Path(environment[CACHE]).is_dir()


def test_all_threads_compile_with_as_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the backward is compiled on one of autograd's."""
    settings: Any = torch._inductor.config
    monkeypatch.setattr(settings._config["compile_threads"], "default", 32)
    keep_compiled({}, 3)
    with ThreadPoolExecutor(1) as autograd:
        seen = autograd.submit(lambda: settings.compile_threads).result()
    assert settings.compile_threads == seen == 3
