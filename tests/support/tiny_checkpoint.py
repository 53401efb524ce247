"""A checkpoint of a tiny Llama as two workers of a trainer would have written it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpointing import Keys, Manifest, Store, TensorSlice, commit, open_store, write_slices

KEYS = Keys()
STEP = 7
NUMBERS = {"optimizer_steps": 3, "skipped_in_a_row": 0}
"""What a run needs beside the tensors to go on."""
MOMENTS = ("exp_avg", "exp_avg_sq")

FALCON_H1: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_d_ssm": 16,
    "mamba_n_heads": 2,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
}
"""Settings of a small model whose configuration holds an infinity; without its vocabulary."""


@dataclass(frozen=True)
class Tiny:
    """The model, and its state after a few optimizer steps."""

    model: Any
    config: dict[str, Any]
    moments: dict[str, torch.Tensor]


def make_tiny(*, tied: bool = False, steps: int = 3) -> Tiny:
    """A two-layer Llama, trained a little so that no number in its state is special."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=40,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        tokens = torch.randint(0, 40, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = {
        f"{key}/{name}": optimizer.state[param][key]
        for name, param in model.named_parameters()
        for key in MOMENTS
    }
    return Tiny(model=model.eval(), config=config.to_dict(), moments=moments)


def state_of(tiny: Tiny) -> dict[str, torch.Tensor]:
    """The state under the names of a trainer's checkpoint."""
    params = {f"param/{name}": p.detach() for name, p in tiny.model.named_parameters()}
    return {**params, **tiny.moments}


def training_state(tiny: Tiny, **more: Any) -> dict[str, Any]:
    """What a trainer keeps beside the tensors."""
    return {
        "step": STEP,
        **NUMBERS,
        "steps": 20,
        "optimizer": {
            "lr": 1e-2,
            "min_lr_ratio": 0.1,
            "warmup_steps": 2,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
        },
        "task": {"model": tiny.config},
        **more,
    }


def commit_shares(
    store: Store,
    shares: Sequence[Sequence[tuple[TensorSlice, torch.Tensor]]],
    *,
    step: int = STEP,
    generation: int = 0,
    state: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
    segment_bytes: int,
    block_bytes: int,
    piece_bytes: int | None = None,
) -> Manifest:
    """A checkpoint of which each rank writes one of `shares`; a piece is a block by default."""
    receipts = [
        write_slices(
            store,
            KEYS,
            rank=rank,
            step=step,
            generation=generation,
            attempt=0,
            slices=share,
            segment_bytes=segment_bytes,
            block_bytes=block_bytes,
            piece_bytes=piece_bytes or block_bytes,
        )
        for rank, share in enumerate(shares)
    ]
    return commit(
        store,
        KEYS,
        step=step,
        generation=generation,
        receipts=receipts,
        training_state=NUMBERS if state is None else state,
        versions=versions or {},
    )


def write_state(
    store: Store,
    tensors: dict[str, torch.Tensor],
    *,
    step: int = STEP,
    generation: int = 0,
    state: dict[str, Any] | None = None,
    segment_bytes: int = 4096,
    block_bytes: int = 512,
    piece_bytes: int | None = None,
) -> Manifest:
    """Commits `tensors`; two workers share the rows of each. A piece is a block by default."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for name, tensor in tensors.items():
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        half = shape[0] // 2
        for rank, (first, rows) in enumerate(((0, half), (half, shape[0] - half))):
            offsets, sizes = (first, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            part = TensorSlice(name, shape, dtype, offsets, sizes)
            parts[rank].append((part, tensor[first : first + rows].clone()))
    return commit_shares(
        store,
        parts,
        step=step,
        generation=generation,
        state=state,
        versions={"torch": torch.__version__},
        segment_bytes=segment_bytes,
        block_bytes=block_bytes,
        piece_bytes=piece_bytes,
    )


def write_tiny(run: Path, tiny: Tiny, **more: Any) -> Store:
    """A run directory with one checkpoint of `tiny`."""
    store = open_store(run / "checkpoints")
    write_state(store, state_of(tiny), state=training_state(tiny, **more))
    return store
