"""Attention over tokens that several workers have: keys and values go round, and each worker puts
together what its queries make of them.

In round i of n a worker has the keys of the i-th worker before it, and while it computes with them
they are on their way to the next one. Each block is put together with those before it by the sums
of their exponentials. In backward the gradients of keys and values follow them round, one round
behind, and are home after n. All sums are made in float32, in an order that rank and n fix.

Two operators of torch's make one of it, so that compilation and recomputation take it as a whole.
torch has a ring of its own, an experiment as yet, for CUDA alone; why it is not this one:
docs/decisions/056. Source: Liu et al., Ring Attention with Blockwise Transformers, 2023.

Shapes: q_BHSD, k_BGSD, v_BGSD (batch, heads, this worker's tokens, head dim); lse_BHS is float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from trainer.parallel.context.head_tail import Block, plan_blocks
from trainer.parallel.context.kernels import Piece, kernel_of
from trainer.unprofiled import unprofiled


class Ring:
    """A worker's place among those that share its samples. It does not keep their group alive.

    Args:
        group: c10d's name of their group; None: this worker is alone.
    """

    def __init__(self, group: str | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(_group(group))
        self.workers = 1 if group is None else dist.get_world_size(_group(group))
        self.documents = None
        self.key = next(key for key in map("ring {}".format, count()) if key not in _rings)
        """Names it to the operators. Compiled blocks have the name in them: a model that is built
        where another has gone gets that one's, and finds its graphs."""
        _rings[self.key] = self

    @property
    def documents(self) -> Sequence[Sequence[int]] | None:
        """Where the texts begin in each sample of the micro-batch that the model computes; see
        `plan_blocks`. It holds until the next micro-batch's forward."""
        return self._documents

    @documents.setter
    def documents(self, documents: Sequence[Sequence[int]] | None) -> None:
        self._documents = documents
        self._planned: dict[tuple[int, int], list[Block]] = {}

    def blocks(self, round_: int, tokens: int) -> list[Block]:
        """What there is to compute in a round: the same for all layers."""
        if (round_, tokens) not in self._planned:
            source = (self.rank - round_) % self.workers
            found = plan_blocks(self.rank, source, self.workers, tokens, self._documents)
            self._planned[round_, tokens] = found
        return self._planned[round_, tokens]

    def pass_on(self, tensor: torch.Tensor) -> _Passing:
        """Begins to send a flat tensor to the next worker, and to receive one like it from the one
        before. All workers call it."""
        assert self._group is not None
        return _Passing(tensor, _group(self._group), self.rank, self.workers)


_rings: weakref.WeakValueDictionary[str, Ring] = weakref.WeakValueDictionary()


def _group(name: str) -> dist.ProcessGroup:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(name)


class _Passing:
    """An exchange under way."""

    def __init__(
        self, tensor: torch.Tensor, group: dist.ProcessGroup, rank: int, workers: int
    ) -> None:
        self._sent, self._received = tensor, torch.empty_like(tensor)
        sends, receives = [0] * workers, [0] * workers
        sends[(rank + 1) % workers] = receives[rank - 1] = tensor.numel()
        # One collective, not a send and a receive: these are not counted among what was begun.
        with nullcontext() if tensor.is_cuda else unprofiled():
            self._work: Any = dist.all_to_all_single(
                self._received, tensor, receives, sends, group=group, async_op=True
            )

    def wait(self) -> torch.Tensor:
        """What has come. On CUDA the stream waits, not the host."""
        self._work.wait()
        return self._received


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, ring: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, lse) of this worker's queries with the keys before them, wherever they are.

    All workers of the ring call it together.
    """
    place, kernel = _rings[ring], kernel_of(query)
    sums = _Sums(query, once=place.workers == 1)
    held = _packed(key, value) if place.workers > 1 else None
    for round_ in range(place.workers):
        coming = None
        if held is not None:
            key, value = _unpacked(held, key, value)
            if round_ + 1 < place.workers:
                coming = place.pass_on(held)
        for block in place.blocks(round_, query.shape[2]):
            q, (k, v) = _of(block, query), _keys_of(block, key, value)
            sums.add(block, *kernel.forward(Piece(q, k, v, block.causal, scale)))
        held = None if coming is None else coming.wait()
    return sums.result()


class _Sums:
    """Blocks of attention, put together: the mean of their results, each weighted by its sum of
    exponentials.

    Args:
        query: all of them.
        once: each is in one block.
    """

    def __init__(self, query: torch.Tensor, *, once: bool) -> None:
        self._query, self._once = query, once
        self._out: torch.Tensor | None = None
        self._lse = torch.empty(0)

    def add(self, block: Block, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds a block's (result, lse)."""
        if self._out is None:
            if block.sample is None:  # all queries
                self._out, self._lse = out.float(), lse
                return
            self._out = torch.zeros_like(self._query, dtype=torch.float32)
            self._lse = self._out.new_full(self._query.shape[:3], -torch.inf)
        out_there, lse_there = _of(block, self._out), _of(block, self._lse)
        if self._once:
            out_there.copy_(out)
            lse_there.copy_(lse)
            return
        both = torch.logaddexp(lse_there, lse)
        out_there.mul_((lse_there - both).exp_().unsqueeze(-1))
        out_there.add_(out.float().mul((lse - both).exp_().unsqueeze(-1)))
        lse_there.copy_(both)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(result, lse) of all."""
        assert self._out is not None
        return self._out.to(self._query.dtype).contiguous(), self._lse.contiguous()


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    ring: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value. All workers of the ring call it together."""
    place, kernel = _rings[ring], kernel_of(query)
    grad = grad.contiguous()
    of_query = query.new_zeros(query.shape, dtype=torch.float32)  # contiguous, as is said below
    held = _packed(key, value) if place.workers > 1 else None
    of_held: _Passing | None = None
    k, v = key, value
    for round_ in range(place.workers):
        coming = None
        if held is not None:
            k, v = _unpacked(held, key, value)
            if round_ + 1 < place.workers:
                coming = place.pass_on(held)
        of_these = torch.zeros(key.numel() + value.numel(), device=key.device)
        of_key, of_value = _unpacked(of_these, key, value)
        for block in place.blocks(round_, query.shape[2]):
            its_k, its_v = _keys_of(block, k, v)
            piece = Piece(_of(block, query), its_k, its_v, block.causal, scale)
            grad_, out_, lse_ = (_of(block, tensor).contiguous() for tensor in (grad, out, lse))
            of_q, of_k, of_v = kernel.backward(grad_, piece, out_, lse_)
            _of(block, of_query).add_(of_q)
            key_sum, value_sum = _keys_of(block, of_key, of_value)
            key_sum.add_(of_k)
            value_sum.add_(of_v)
        if place.workers > 1:
            if of_held is not None:
                of_these.add_(of_held.wait())
            of_held = place.pass_on(of_these)
        held = None if coming is None else coming.wait()
    if of_held is not None:
        of_these = of_held.wait()
    of_key, of_value = _unpacked(of_these, key, value)
    # Copies, as results of an operator may not share memory.
    of_key, of_value = of_key.to(key.dtype, copy=True), of_value.to(value.dtype, copy=True)
    return of_query.to(query.dtype), of_key, of_value


def _of(block: Block, tensor: torch.Tensor) -> torch.Tensor:
    """The queries of a block, in a tensor (batch, heads, tokens, ...)."""
    return _cut(tensor, block.sample, block.queries)


def _keys_of(block: Block, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [_cut(tensor, block.sample, block.keys) for tensor in tensors]


def _cut(tensor: torch.Tensor, sample: int | None, tokens: slice) -> torch.Tensor:
    samples = slice(None) if sample is None else slice(sample, sample + 1)
    return tensor[samples, :, tokens]


def _packed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.cat([key.flatten(), value.flatten()])


def _unpacked(
    flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a flat tensor, of the shapes of `key` and `value`."""
    first, second = flat.split([key.numel(), value.numel()])
    return first.view(key.shape), second.view(value.shape)


@torch.library.custom_op("elastic::ring_attention", mutates_args=())
def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, ring: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `forward`."""
    return forward(query, key, value, scale, ring)


@torch.library.custom_op("elastic::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    ring: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `backward`."""
    return backward(grad, query, key, value, out, lse, scale, ring)


@ring_attention.register_fake
def _(query: Any, key: Any, value: Any, scale: float, ring: str) -> Any:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


@ring_attention_backward.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
    form = torch.contiguous_format
    return tuple(torch.empty_like(t, memory_format=form) for t in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, ctx.scale, ctx.ring = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    found = ring_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.ring)
    return (*found, None, None)


ring_attention.register_autograd(_gradients, setup_context=_keep)

COMPOSED: dict[Any, Callable[..., Any]] = {
    torch.ops.elastic.ring_attention.default: forward,
    torch.ops.elastic.ring_attention_backward.default: backward,
}
"""The operators, and what each is made of."""
