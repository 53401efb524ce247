"""AdamW with moments or parameters in bfloat16: right on average, and the same wherever it is
computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.counting_backend import Counting
from trainer import rounded_adamw
from trainer.config import OptimizerConfig
from trainer.engine.optimizer import SliceOptimizer, as_leaf, try_optimizer
from trainer.rounded_adamw import hash_bits, round_by

NUMBERS, STEPS = 4096, 500
CONFIG = OptimizerConfig(
    lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, clip_norm=0.0, moment_dtype="bfloat16"
)
STORED = [
    CONFIG,
    replace(CONFIG, master_dtype="bfloat16"),
    replace(CONFIG, master_dtype="bfloat16", moment_dtype="float32"),
]
"""What is bfloat16: the moments, all of it, the parameters."""


@pytest.fixture(autouse=True)
def no_graphs_of_others() -> Iterator[None]:
    """Each way to store has three, and dynamo makes eight of one function. A run has one way."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(step: int) -> torch.Tensor:
    """About one in size, of either sign, the same sign in all steps."""
    noise = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(step))
    signs = torch.where(torch.arange(NUMBERS) % 2 == 0, 1.0, -1.0)
    return signs * (1 + 0.1 * noise)


def trained(
    config: OptimizerConfig, steps: int = STEPS, compiled: Any = "off"
) -> tuple[nn.Parameter, SliceOptimizer]:
    param = as_leaf(torch.ones(NUMBERS, dtype=getattr(torch, config.master_dtype)))
    counter = try_optimizer(config, compiled=compiled)
    optimizer = SliceOptimizer(config, {"weight": param}, counter, compiled)
    for step in range(steps):
        param.grad = gradients(step)
        optimizer.step(config.lr)
    return param, optimizer


def test_the_moments_are_right_on_average() -> None:
    """To the nearest one, the second moment would stop at a quarter, where the next bfloat16 is
    more than twice an update away."""
    param, optimizer = trained(CONFIG)
    same, wide = trained(replace(CONFIG, moment_dtype="float32"))
    for moment in CONFIG.moments:
        found, expected = (o.moments[moment]["weight"] for o in (optimizer, wide))
        assert found.dtype == torch.bfloat16
        ratio = found.double() / expected.double()
        assert ratio.mean().item() == pytest.approx(1, abs=2e-3), moment
        assert ratio.std() < 0.05
    assert wide.moments["exp_avg_sq"]["weight"].mean() > 0.39
    torch.testing.assert_close(param, same, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_the_parameters_are_right_on_average(moments: Any) -> None:
    """At a rate of 1e-3 an update is a quarter of the step from one bfloat16 to the next at 1, or
    an eighth: to the nearest one, no parameter would ever move."""
    config = replace(CONFIG, master_dtype="bfloat16", moment_dtype=moments)
    param, optimizer = trained(config, 100)
    same, _ = trained(replace(CONFIG, moment_dtype="float32"), 100)
    assert param.dtype == torch.bfloat16
    assert {m["weight"].dtype for m in optimizer.moments.values()} == {getattr(torch, moments)}
    assert same.detach().sub(1).abs().min() > 0.09
    difference = param.double() - same.double()
    assert difference.mean().abs() < 1e-3
    assert difference.std() < 0.03  # of 100 draws between neighbours


@pytest.mark.parametrize("config", STORED)
def test_compiled_it_is_right_on_average_too(config: OptimizerConfig) -> None:
    """And elementwise, in place, and going on from a copy, by the trial. With each of its draws
    decided otherwise, as it rounds otherwise before."""
    param, optimizer = trained(config, 100, "require")
    again, _ = trained(config, 100, "require")
    plain, other = trained(config, 100)
    assert torch.equal(param, again)
    if config.master_dtype == "bfloat16":
        assert not torch.equal(param, plain), "it was not compiled"
    difference = param.double() - plain.double()
    assert difference.mean().abs() < 1e-3 and difference.std() < 0.05
    for moment in config.moments:
        found, expected = (o.moments[moment]["weight"].double() for o in (optimizer, other))
        assert (found / expected).mean().item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("config", STORED[1:2])
def test_compiled_it_scales_the_gradients_itself(config: OptimizerConfig) -> None:
    """As a pass over them before it would, and leaves them as they are."""
    found = []
    for scales in (0.3, 1.0), (1.0, 0.3):
        param = as_leaf(torch.ones(NUMBERS, dtype=torch.bfloat16))
        optimizer = SliceOptimizer(config, {"weight": param}, torch.zeros(()), "require")
        assert optimizer.takes_scale
        for step in range(3):
            param.grad = gradients(step) * scales[0]
            given = param.grad.clone()
            optimizer.step(config.lr, scales[1])
            assert torch.equal(param.grad, given)
        found.append([param, *(each["weight"] for each in optimizer.moments.values())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not SliceOptimizer(config, {"weight": param}, torch.zeros(())).takes_scale


def test_compiled_it_is_one_kernel_that_can_load_in_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any size that 16 divides, which the code knows; and what is the same for all numbers is
    computed before it."""
    code = code_of_update(monkeypatch, NUMBERS)
    assert code.count("= async_compile.") == 1 and "16L*ks0" in code
    assert "pow(" not in code and code.count("sqrt(") == 1


def test_compiled_it_has_one_graph_for_slices_of_all_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs seconds of compiling, and what the trial has not seen the first step compiles."""
    graphs = Counting()
    compiled = torch.compile(rounded_adamw.update, fullgraph=True, dynamic=True, backend=graphs)
    monkeypatch.setattr(rounded_adamw, "_compiled_update", lambda required: compiled)
    monkeypatch.setattr(rounded_adamw, "_TOGETHER", 32)
    try_optimizer(STORED[1], compiled="require")
    shapes = [(8, 4, 16), (96,), (16,), (7,), (1,), (), (0, 5), (9, 77)]
    params = {str(shape): as_leaf(torch.ones(shape).bfloat16()) for shape in shapes}
    optimizer = SliceOptimizer(STORED[1], params, torch.zeros(()), "require")
    for param in params.values():
        param.grad = torch.ones(param.shape)
    optimizer.step(1e-3)
    assert graphs.graphs == 1 and graphs.calls > 10


def test_compiled_it_takes_large_slices_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel copies a gradient that is not aligned: of a piece, not of a whole table."""
    sizes = list[int]()

    def update(param: torch.Tensor, *_: torch.Tensor) -> None:
        sizes.append(param.numel())

    monkeypatch.setattr(rounded_adamw, "_compiled_update", lambda required: update)
    monkeypatch.setattr(rounded_adamw, "_COMPILED_AT_ONCE", 64)
    monkeypatch.setattr(rounded_adamw, "_TOGETHER", 32)
    param = as_leaf(torch.ones(200).bfloat16())
    param.grad = torch.ones(200)
    SliceOptimizer(STORED[1], {"weight": param}, torch.zeros(()), "require").step(1e-3)
    assert sizes == [64, 64, 64, 32]


@pytest.mark.parametrize("least", [32, 1 << 16])
def test_compiled_a_part_of_any_size_comes_out_as_in_the_whole(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever worker has it, in a call of its own or with others."""
    monkeypatch.setattr(rounded_adamw, "_TOGETHER", least)
    numbers = torch.randn(101, generator=torch.Generator().manual_seed(3)).bfloat16()

    def updated(start: int, stop: int) -> list[torch.Tensor]:
        param = as_leaf(numbers[start:stop].clone())
        optimizer = SliceOptimizer(STORED[1], {"weight": param}, torch.zeros(()), "require")
        for step in range(3):
            param.grad = gradients(step)[start:stop].clone()
            optimizer.step(1e-2)
        return [param.detach(), *(each["weight"] for each in optimizer.moments.values())]

    whole = updated(0, 101)
    several = [as_leaf(numbers[a:b].clone()) for a, b in [(0, 5), (5, 60), (60, 101)]]
    named = {str(number): param for number, param in enumerate(several)}
    together = SliceOptimizer(STORED[1], named, torch.zeros(()), "require")
    for step in range(3):
        for param, (a, b) in zip(several, [(0, 5), (5, 60), (60, 101)], strict=True):
            param.grad = gradients(step)[a:b].clone()
        together.step(1e-2)
    assert torch.equal(torch.cat([param.detach() for param in several]), whole[0])
    assert not torch.equal(whole[0], numbers)
    for start, stop in [(0, 1), (1, 17), (17, 33), (33, 84), (84, 101)]:
        for part, all_of_it in zip(updated(start, stop), whole, strict=True):
            assert torch.equal(part, all_of_it[start:stop]), (start, stop)


@pytest.mark.parametrize(
    ("least", "calls"),
    [(32, [32, 48, 64]), (48, [48, 96]), (1 << 16, [144])],
)
def test_compiled_all_that_is_small_or_fills_no_row_is_updated_at_once(
    least: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of norms there are many, and sharded they are short."""
    monkeypatch.setattr(rounded_adamw, "_TOGETHER", least)
    sizes = list[int]()

    def update(param: torch.Tensor, *_: torch.Tensor) -> None:
        sizes.append(param.numel())

    monkeypatch.setattr(rounded_adamw, "_compiled_update", lambda required: update)
    params = {str(size): as_leaf(torch.ones(size).bfloat16()) for size in (16, 7, 40, 48, 3, 30)}
    for param in params.values():
        param.grad = torch.ones(param.shape)
    SliceOptimizer(STORED[1], params, torch.zeros(()), "require").step(1e-3)
    assert sizes == calls  # of 40 and 48 their rows, then 16 + 7 + 8 + 3 + 30; or more at the end


def test_a_backward_over_weights_that_were_updated_meanwhile_is_noticed() -> None:
    param = as_leaf(torch.ones(32, dtype=torch.bfloat16))
    optimizer = SliceOptimizer(STORED[1], {"weight": param}, torch.zeros(()), "require")
    loss = param.square().sum()
    param.grad = torch.ones(32)
    optimizer.step(1e-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def code_of_update(monkeypatch: pytest.MonkeyPatch, numbers: int) -> str:
    """What torch.compile would have compiled."""
    from torch._inductor import config as settings
    from torch._inductor.graph import GraphLowering

    codes = list[str]()

    def keep(graph: GraphLowering) -> None:
        codes.append(graph.codegen()[0].value)
        raise InterruptedError

    monkeypatch.setattr(GraphLowering, "compile_to_module", keep)
    param = as_leaf(torch.ones(numbers, dtype=torch.bfloat16))
    param.grad = torch.ones(numbers)
    with (
        settings.patch({"force_disable_caches": True, "cpp.simdlen": 0}),  # no compiler is asked
        pytest.raises(Exception, match="InterruptedError"),
    ):
        SliceOptimizer(STORED[1], {"weight": param}, torch.zeros(()), "require").step(1e-3)
    return codes[0]


@pytest.mark.parametrize("config", STORED)
def test_it_is_what_a_run_can_live_with(config: OptimizerConfig) -> None:
    """Elementwise, in place, and going on from a copy."""
    assert try_optimizer(config) is not None


@pytest.mark.parametrize("config", STORED)
def test_numbers_that_are_updated_in_parts_come_out_the_same(
    monkeypatch: pytest.MonkeyPatch, config: OptimizerConfig
) -> None:
    param, whole = trained(config, 3)
    monkeypatch.setattr(rounded_adamw, "_AT_ONCE", NUMBERS // 4)
    same, parts = trained(config, 3)
    assert torch.equal(param, same)
    for moment in CONFIG.moments:
        assert torch.equal(whole.moments[moment]["weight"], parts.moments[moment]["weight"])


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_the_bits_look_random(step: int) -> None:
    """Of equal gradients, too; and those of one step tell nothing of the next one's."""
    other = torch.linspace(0.5, 1, 1 << 16)

    def bits(at: int) -> Any:
        words = torch.ones(1 << 16).view(torch.int32)
        found = hash_bits(words, other.view(torch.int32), torch.tensor(float(at)))
        return (found.view(-1, 1) >> torch.arange(32)) & 1

    now, then = bits(step), bits(step + 1)
    assert (now.double().mean(0) - 0.5).abs().max() < 0.01
    assert ((now ^ then).double().mean(0) - 0.5).abs().max() < 0.01
    assert ((now[1:] ^ now[:-1]).double().mean(0) - 0.5).abs().max() < 0.01


def test_what_a_bfloat16_holds_is_not_rounded() -> None:
    exact = torch.tensor([0.0, 1.0, -1.5, 2.0**-120, -3.0e38]).bfloat16().float()
    numbers = exact.clone()
    round_by(numbers, torch.full((5,), 0xFFFF, dtype=torch.int32))
    assert torch.equal(numbers, exact)
    numbers = torch.tensor([1 + 2.0**-8])  # half way
    round_by(numbers, torch.tensor([0x7FFF], dtype=torch.int32))
    assert numbers == 1
    numbers = torch.tensor([-1 - 2.0**-8])
    round_by(numbers, torch.tensor([0x8000], dtype=torch.int32))
    assert numbers == -1 - 2.0**-7
