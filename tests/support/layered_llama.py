"""A Llama of four small layers, for tests of what is done block by block."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

LENGTH, VOCABULARY, LAYERS = 16, 64, 4


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def flat() -> nn.Module:
    """A model without layers."""
    return nn.Linear(2, 2)


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    targets = batch[:, 1:]
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def tokens(seed: int, count: int = 16) -> list[torch.Tensor]:
    """Samples, drawn."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator) for _ in range(count)]
