"""A language model's head that returns losses, so that its logits never exist whole.

Logits of 8,192 tokens over 128,256 words are 4.2 GB in float32, and their gradient as much again.
The head takes a chunk of the tokens at a time: of each it keeps the input and the sum of the
losses, and computes the chunk's logits once more in backward. That happens within the head's own
forward, so FSDP's and tensor parallelism's hooks are round it as ever.

Shapes: x_BSD is (batch, sequence, model dim), N is batch × sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigError
from trainer.models.causal import TOKENS, try_small

Logits = Callable[[torch.Tensor], torch.Tensor]
Entropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PIECE_BYTES = 2**26
"""Of logits in float32 that exist at once where there is no backward; their softmax is as much."""


def sum_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of all targets in float32, added up; logits have any number format.

    Without a backward it takes a piece of the tokens at a time: not compiled, it would write 8
    bytes a logit, and an evaluation take more than a step whose loss is compiled. The pieces depend
    on the vocabulary alone, and so do the sum's bits.
    """
    if not torch.is_grad_enabled():
        rows = max(1, PIECE_BYTES // (4 * logits_NV.shape[-1]))
        pieces = zip(logits_NV.split(rows), targets_N.split(rows), strict=True)
        return torch.stack([_sum_entropy(*piece) for piece in pieces]).sum()
    return _sum_entropy(logits_NV, targets_N)


def _sum_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits_NV.float(), targets_N, reduction="sum")


def chunk_head(model: Any, chunk: int, entropy: Entropy = sum_entropy) -> None:
    """Has the head of a transformers model work on `chunk` tokens at a time. In place, before
    tensor parallelism and FSDP2.

    Args:
        model: it.
        chunk: tokens.
        entropy: `sum_entropy`, or what does the same.

    Raises:
        ConfigError: the model has no head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError("train.task.loss_chunk", chunk, "the model has no head", "Use None")
    head.chunked_losses = _Losses(chunk, entropy)
    head.forward = partial(head.chunked_losses.forward, head.forward)


def with_losses(model: Any, targets: torch.Tensor, **inputs: Any) -> Any:
    """What a model that `chunk_head` has changed makes of its inputs, with the cross-entropy of all
    targets, added up, in place of logits.

    Args:
        model: it, or what a converter has wrapped it in.
        targets: (batch, sequence).
        inputs: of its forward.

    Raises:
        ConfigError: the model changes its logits after the head, or a converter has replaced that.
    """
    losses = _losses_of(model)
    losses.targets = targets
    try:
        output = model(**inputs)
    finally:
        losses.targets = None
    losses.check(output.logits)
    return output


def _losses_of(model: Any) -> _Losses:
    """What `chunk_head` has given to the head, whatever is round it by now. The model remembers it:
    it is asked in each micro-batch."""
    found = (vars(module).get("chunked_losses") for module in model.modules())
    losses = next((one for one in found if one is not None), None)
    if losses is None:
        raise ConfigError(
            "train.converters",
            type(model).__name__,
            "they have put another head in the place of the one that train.task.loss_chunk has "
            "work on some tokens at a time",
            "Use loss_chunk=None, or converters that leave the head as it is",
        )
    model.chunked_losses = losses
    return losses


def check_chunks(config: Mapping[str, Any], chunk: int, seq_len: int) -> None:
    """Tries a small model of a configuration, with random weights, before anything starts. What
    cannot be tried is refused in its first micro-batch.

    Args:
        config: the complete configuration.
        chunk: tokens.
        seq_len: tokens in a sample.

    Raises:
        ConfigError: the model has no head, or changes its logits after it.
    """
    refused, _ = try_small(config, partial(_refusal, chunk=chunk, tokens=min(seq_len, TOKENS)))
    if isinstance(refused, ConfigError):
        raise refused


def _refusal(model: Any, *, chunk: int, tokens: int) -> ConfigError | Literal["none"]:
    """Of a small model on the meta device."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        named = model.named_parameters(remove_duplicate=False)
        weights = {name: torch.randn(param.shape) * 0.2 for name, param in named}
        model.load_state_dict(weights, strict=False, assign=True)
        ids = torch.arange(2, 2 + tokens)[None]
        try:
            chunk_head(model, chunk)
            with_losses(model, ids, input_ids=ids, use_cache=False)
        except ConfigError as error:
            return error
    return "none"


def same(returned: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether it is. Waits for the device, in a model's first micro-batch alone."""
    return torch.equal(returned.detach(), first)


class _Losses:
    def __init__(self, chunk: int, entropy: Entropy) -> None:
        self._chunk, self._entropy = chunk, entropy
        self._first: torch.Tensor | None = None
        self._checked = False
        self.targets: torch.Tensor | None = None
        """Of the forward that is under way; None: the head gives logits."""

    def forward(self, logits: Logits, x_BSD: torch.Tensor) -> torch.Tensor:
        """The head's."""
        if self.targets is None:
            return logits(x_BSD)
        run = partial(_loss, logits, self._entropy)
        if torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False)
        x_ND, targets_N = x_BSD.flatten(0, 1), self.targets.flatten()
        chunks = zip(x_ND.split(self._chunk), targets_N.split(self._chunk), strict=True)
        total = torch.stack([run(*chunk) for chunk in chunks]).sum()
        if not self._checked:
            self._first = total.detach()
        if isinstance(x_BSD, DTensor):  # for the hook that makes it a plain tensor again
            return DTensor.from_local(total, x_BSD.device_mesh, (Replicate(),), run_check=False)
        return total

    def check(self, returned: torch.Tensor) -> None:
        """The first time alone: whether what the head gave is what the model has returned. A loss
        that is no number does not say."""
        if self._checked:
            return
        first = self._first
        if first is None or not same(returned, first):
            if first is not None and first.isnan():
                return
            raise ConfigError(
                "train.task.loss_chunk",
                self._chunk,
                "the model changes its logits after its head",
                "Use None",
            )
        self._first, self._checked = None, True


def _loss(
    logits: Logits, entropy: Entropy, x_ND: torch.Tensor, targets_N: torch.Tensor
) -> torch.Tensor:
    found_NV = logits(x_ND)
    if isinstance(found_NV, DTensor):
        found_NV = found_NV.redistribute(placements=(Replicate(),)).to_local()
    return entropy(found_NV, targets_N)
