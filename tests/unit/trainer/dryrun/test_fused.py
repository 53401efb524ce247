"""What compiled code writes to memory, as a dry run counts it. Held against what inductor's code
takes in test_dryrun_peak.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from trainer.dryrun.fused import make_backend
from trainer.dryrun.watch import Watch
from trainer.models.chunked_head import sum_entropy
from trainer.parallel.compiled import compile_function, compiled_by

N = 64
MATRIX = N * N * 4


@contextmanager
def watched() -> Iterator[Watch]:
    """On fake tensors, with what compiles itself counted."""
    watch = Watch()
    with compiled_by(make_backend()), FakeTensorMode(), watch:
        yield watch


def taken(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    """Bytes that a compiled function takes at its peak, beside its inputs."""
    compiled = compile_function("it", function, required=True)
    with watched() as watch:
        given = [torch.empty(shape) for shape in shapes]
        before = sum(watch.peak.values())
        kept = compiled(*given)
        del kept
    return sum(watch.peak.values()) - before


SQUARE = (N, N)


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        pytest.param(lambda x: (x * 2 + 1).relu(), [SQUARE], MATRIX, id="one kernel"),
        pytest.param(lambda x: (x.exp() * 2).sum(1), [SQUARE], N * 4, id="a sum"),
        pytest.param(lambda x, w: (x * 2) @ w, [SQUARE, SQUARE], 2 * MATRIX, id="a product of it"),
        pytest.param(
            lambda x, w: (x * 2).view(2, N // 2, N).transpose(0, 1).reshape(N, N) @ w,
            [SQUARE, SQUARE],
            2 * MATRIX,
            id="views",
        ),
        pytest.param(
            lambda x, w, v: torch.cat([x @ w, x @ v]).sin(),
            [SQUARE, SQUARE, SQUARE],
            4 * MATRIX,
            id="what is read waits until it is",
        ),
        pytest.param(
            lambda x: x.mul(2).max(1).values + 1, [SQUARE], N * 4, id="one of two results"
        ),
    ],
)
def test_a_result_is_written_where_another_kernel_reads_it(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: int
) -> None:
    assert taken(function, *shapes) == expected


def test_a_loss_keeps_logits_and_writes_their_gradient() -> None:
    """In the logits' own format, and nothing of their size beside."""
    words, tokens = 4096, 8
    compiled = compile_function("the loss", sum_entropy, required=True)
    with watched() as watch:
        logits = torch.empty(tokens, words, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64)
        compiled(logits, targets).backward()
    assert logits.grad is not None
    size = tokens * words * 2
    assert sum(watch.peak.values()) == pytest.approx(2 * size, rel=0.01)


def test_a_graph_that_is_done_again_draws_no_random_numbers() -> None:
    """Recomputed, it has the generator's state held round what is random, here as in attention."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ x, 0.5).sin()

    def block(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inside, x, use_reentrant=False)

    compiled = compile_function("block", block, required=True)
    with watched() as watch:
        x = torch.empty(N, N, requires_grad=True)
        compiled(x).sum().backward()
    assert sum(watch.peak.values()) < 8 * MATRIX


def test_what_cannot_be_compiled_is_counted_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def decides(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2 + 1

    compiled = compile_function("block 3", decides, required=False)
    with watched() as watch, torch.enable_grad():
        compiled(torch.empty(N, N))
    assert "not compiled, on any worker: block 3" in caplog.text
    assert sum(watch.peak.values()) == 3 * MATRIX


def test_nothing_that_was_counted_stays_with_the_code() -> None:
    """The process may compile the same code in earnest."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = compile_function("it", double, required=True, backend="eager")
    with watched():
        compiled(torch.empty(N))
        kept = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(double.__code__)
        assert len(kept) == 1
    assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(double.__code__)
    assert torch.equal(compiled(torch.ones(N)), torch.full((N,), 2.0))


def test_a_wait_for_a_collective_takes_nothing() -> None:
    with FakeTensorMode(), Watch() as watch:
        x = torch.empty(N, N)
        assert torch.ops._c10d_functional.wait_tensor(x) is x
    assert sum(watch.peak.values()) == MATRIX
