"""A ring of one worker, against torch's attention with a mask. Several workers:
tests/integration/test_matrix.py."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.parallel.context import ring as rings
from trainer.parallel.context.kernels import CudaKernel, Piece
from trainer.parallel.context.ring import Ring, ring_attention, ring_attention_backward

TOKENS, SIZE = 16, 8


def inputs(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Query with four heads, key and value with two."""
    torch.manual_seed(0)
    return [
        torch.randn(2, heads, TOKENS, SIZE, dtype=dtype, device=device, requires_grad=True)
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("documents", [None, [[0, 5, 6, 13], [0]]])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_it_is_attention_with_a_mask(
    documents: list[list[int]] | None, dtype: torch.dtype, bound: float
) -> None:
    ring, given = Ring(), inputs(dtype)
    ring.documents = documents
    out, _ = ring_attention(*given, 0.3, ring.key)
    text = torch.zeros(2, TOKENS)
    for sample, starts in enumerate(documents or []):
        for start in starts:
            text[sample, start:] += 1
    mask = (text[:, :, None] == text[:, None]).tril()[:, None]
    exact = [x.detach().double().requires_grad_() for x in given]
    query, key, value = exact
    wanted = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, given, grad)
    due = torch.autograd.grad(wanted, exact, grad.double())
    for ours, theirs in zip((out, *found), (wanted, *due), strict=True):
        assert ours.dtype == dtype
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < bound


@pytest.mark.parametrize("heads_last", [False, True])
def test_compilation_and_recomputation_take_it_as_a_whole(heads_last: bool) -> None:
    """Its parts are seen by nobody; forms, strides and gradients are checked by torch. A compiler
    may have the heads of each token beside each other in memory."""
    ring, given = Ring(), [x.detach() for x in inputs(torch.float32)]
    if heads_last:
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    query, key, value = (x.requires_grad_() for x in given)
    arguments = (query, key, value, 0.5, ring.key)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ring_attention, arguments, test_utils=checks)
    out, lse = (x.detach() for x in ring_attention(*arguments))
    backward = (torch.ones_like(out), *(x.detach() for x in given), out, lse, 0.5, ring.key)
    torch.library.opcheck(ring_attention_backward, backward, test_utils=checks)


def test_a_ring_ends_with_its_model() -> None:
    ring = Ring()
    key = ring.key
    assert key in rings._rings
    del ring
    gc.collect()
    assert key not in rings._rings


def test_the_gpus_kernel_is_called_as_torch_declares_it() -> None:
    """On the meta device: names, order and forms, no numbers."""
    query, key, value = (x.detach() for x in inputs(torch.bfloat16, "meta"))
    piece = Piece(query, key, value, True, 0.5)
    kernel: Any = CudaKernel()
    out, lse = kernel.forward(piece)
    assert (out.shape, tuple(lse.shape)) == (query.shape, (2, 4, TOKENS))
    found = kernel.backward(out, piece, out, lse)
    assert [x.shape for x in found] == [query.shape, key.shape, value.shape]
