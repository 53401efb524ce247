"""Activations that are computed again in backward instead of being kept.

A block keeps its inputs, and its forward runs once more when backward comes to it. Names of
modules and parameters stay what they are: only `forward` of a block is another one. The numbers are
the same bits, as the same operations are done on the same values.
Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import trainer.parallel.context.ring  # noqa: F401  its operators

Recompute = Literal["full", "selective"] | int
"""See `TrainConfig.recompute`."""

_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,  # in 8 bits, on GPUs
)
_KEPT = (
    torch.ops.elastic.ring_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
"""Dear to compute beside their size: attention, and what other workers must take part in."""


def recompute_blocks(model: nn.Module, blocks: Sequence[str], what: Recompute) -> None:
    """Has blocks compute again in backward what they would keep. In place, before FSDP2.

    Args:
        model: the model.
        blocks: names of its repeated blocks, in order.
        what: "full": all that is inside each block; a number n: inside each n-th block;
            "selective": all but attention, sums that came from other workers, and every second
            matrix product. What tensor ranks gather is gathered again: whole sequences are large.
    """
    every = 1 if isinstance(what, str) else what
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = _keep_some
    for name in blocks[::every]:
        block = model.get_submodule(name)
        block.forward = partial(_in_training, block, block.forward, options)


def _in_training(
    block: nn.Module,
    forward: Callable[..., Any],
    options: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **options, **kwargs)


def _keep_some() -> Any:
    products = Counter[bool]()

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        kept = operation in _KEPT
        if operation in _PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
