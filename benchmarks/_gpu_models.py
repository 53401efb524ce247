"""The models of the GPU benchmark, and how their work is counted.

The text is random: what it says changes no step's time. Weights are drawn on the device, since
nothing here depends on their values, and from the seed 8 billion take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn

from benchmarks._random_text import prepared
from trainer.config import OffloadConfig, OptimizerConfig, TrainConfig
from trainer.data.config import DataConfig
from trainer.float8.config import Float8
from trainer.models.converter import ModelConverter
from trainer.models.flops import ATTENTION, SIX_N
from trainer.models.hf import ModelConfig
from trainer.tasks.causal_lm import CausalLM
from trainer.te.config import TransformerEngine

_LLAMA = {"max_position_embeddings": 8192, "rope_theta": 500000.0, "vocab_size": 128256}

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 128,
    },
    "1B": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "3B": {
        **_LLAMA,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Settings of Llama 3.2 1B and 3B and of Llama 3.1 8B, but for the scaling of positions."""


CONVERTERS: dict[str, tuple[ModelConverter, ...]] = {
    "bf16": (),
    "tensorwise": (Float8(recipe="tensorwise"),),
    "tensorwise, gathered": (Float8(recipe="tensorwise", gather=True),),
    "rowwise": (Float8(recipe="rowwise"),),
    "library": (TransformerEngine(),),
    "library, 8 bits": (TransformerEngine(float8="current"),),
}
"""How linear layers multiply, by the name that a workload has for it."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step has to do; the same for all systems."""

    size: str
    """Of SIZES."""
    seq_len: int
    """Tokens in a sample."""
    samples: int
    """In a step."""
    micro: int
    """Of them that go through the model at once."""
    device: Literal["cpu", "cuda"]
    """Where."""
    recompute: Literal["full", "selective"] | int | float | None = None
    """See TrainConfig."""
    loss_chunk: int | None = None
    """See CausalLM."""
    compile: Literal["off", "on"] = "off"
    """See TrainConfig."""
    state: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and moments; see OptimizerConfig. The plain loop rounds to the nearest."""
    products: str = "bf16"
    """Of CONVERTERS."""
    offload: int | None = None
    """The horizon of OffloadConfig; None: activations stay on the device."""
    determinism: Literal["strict", "fast"] = "strict"
    """See TrainConfig. Of ours alone: what is compared with it promises nothing."""

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.samples * self.seq_len

    def train(self, steps: int) -> TrainConfig:
        """A run of it, whose task the dry run takes as it is."""
        settings = SIZES[self.size]
        return TrainConfig(
            task=CausalLM(
                model=ModelConfig(settings=settings),
                data=DataConfig(paths=("none",), vocab_size=settings["vocab_size"]),
                seq_len=self.seq_len,
                loss_chunk=self.loss_chunk,
            ),
            steps=steps,
            global_batch=self.samples,
            micro_batch=self.micro,
            lanes=1,
            optimizer=OptimizerConfig(
                warmup_steps=1, master_dtype=self.state, moment_dtype=self.state
            ),
            # By scales for each row, products come in bfloat16, on a CPU, too.
            precision="bfloat16" if self.device == "cuda" or self.products != "bf16" else "float32",
            recompute=self.recompute,
            converters=CONVERTERS[self.products],
            compile=self.compile,
            determinism=self.determinism,
            offload=self._offload(settings["num_hidden_layers"]),
        )

    def _offload(self, blocks: int) -> OffloadConfig | None:
        if self.offload is None:
            return None
        least_bytes = 1 if self.size == "tiny" else OffloadConfig.least_bytes
        return OffloadConfig(horizon=min(self.offload, blocks - 1), least_bytes=least_bytes)


def draw_weights(model: nn.Module) -> None:
    """Fills what a model has on this device."""
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.02) if param.dim() > 1 else param.fill_(1.0)


WITH_TABLE = "with table"
"""`attention`, and 6 for each number of the embedding table. So counts KempnerForge's report of
57.8 % at 8B (kempnerforge/metrics/mfu.py at 21248ca; since db38a39 it leaves the table out), and
llm-foundry. Where the head has the table's weights it is the same as `attention`."""


def flops_per_token(work: Workload) -> dict[str, float]:
    """Operations for one token, forward and backward, by counting; see `trainer.models.flops`."""
    task = prepared(work.train(2))
    model = task.build(0)[0]
    found = task.flops_per_token(model)
    if ATTENTION not in found:
        return found
    parameters = sum(param.numel() for param in model.parameters())
    return {**found, WITH_TABLE: 6 * parameters + found[ATTENTION] - found[SIX_N]}


_OF_OURS = {"determinism", "products", "offload", "loss_chunk"}
_OF_LOOPS = {"recompute", "compile", "state"}
_CHOSEN = {
    "ours": _OF_OURS | _OF_LOOPS,
    "plain": {"loss_chunk"} | _OF_LOOPS,
    "hugging_face": set[str](),
}
"""System -> the fields of a workload that it goes by, beside those that all have alike."""


def shared_settings(work: Workload) -> dict[str, Any]:
    """What all systems have of a workload, as JSON."""
    return _chosen(work, {field.name for field in fields(work)} - _OF_OURS - _OF_LOOPS)


def own_settings(system: str, work: Workload) -> dict[str, Any]:
    """What one of them goes by beside that, as JSON."""
    return {"system": system, **_chosen(work, _CHOSEN[system])}


def _chosen(work: Workload, names: set[str]) -> dict[str, Any]:
    return {field.name: getattr(work, field.name) for field in fields(work) if field.name in names}
