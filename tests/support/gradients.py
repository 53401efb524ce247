"""The gradient of a run's first step by plain transformers and PyTorch, in float32 and one
process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from trainer.config import TrainConfig
from trainer.data import sample_ids
from trainer.optimizer import master_dtype
from trainer.tasks.causal_lm import PreparedCausalLM

Gradients = dict[str, torch.Tensor]
"""By the parameter's name."""


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """What a step comes to."""

    loss: float
    """Mean over the step's targets."""
    gradients: Gradients
    """Of that."""


def plain_first_step(task: PreparedCausalLM, train: TrainConfig) -> FirstStep:
    """No FSDP, no lanes, no micro-batches: samples, or texts where they are apart, through
    transformers' own attention; those of one length together."""
    model = fill_whole(replace(task, loss_chunk=None), train)
    total, targets = torch.zeros(()), 0
    alike: dict[int, list[torch.Tensor]] = {}
    for text in _texts(task, train):
        alike.setdefault(len(text), []).append(text)
    for texts in alike.values():
        batch = torch.stack(texts)
        logits = model(input_ids=batch[:, :-1]).logits
        total = total + cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        targets += batch[:, 1:].numel()
    mean = total / targets
    mean.backward()
    return FirstStep(
        loss=mean.item(),
        gradients={n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


def fill_whole(task: PreparedCausalLM, train: TrainConfig) -> Any:
    """The whole model with the run's initial weights, in the number format that they have there,
    and transformers' own attention."""
    model: Any
    model, source = task.build(train.seed)
    model.config._attn_implementation = "sdpa"
    kept = getattr(torch, master_dtype(train.optimizer))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    values = {
        n: source.read(n, tuple(p.shape), (0,) * p.dim(), tuple(p.shape)).to(kept)
        for n, p in model.named_parameters()
    }
    model.to_empty(device="cpu")
    model.load_state_dict(values, strict=False)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])
    return model


def _texts(task: PreparedCausalLM, train: TrainConfig) -> Iterator[torch.Tensor]:
    """Each int64, (tokens + 1,): what sees nothing of the others."""
    data: Any = task.train_data()
    ids = sample_ids(train.seed, 0, train.global_batch, len(data))
    for sample in ids.tolist():
        window = data.tokens.read(sample * task.seq_len, task.seq_len + 1).astype(np.int64)
        ends = [] if task.end_id is None else np.flatnonzero(window[:-2] == task.end_id).tolist()
        begins = [0, *(end + 1 for end in ends)]
        for begin, end in zip(begins, [*begins[1:], task.seq_len], strict=True):
            yield torch.from_numpy(window[begin : end + 1])
