"""What `TrainConfig.determinism` sets in a worker, why, and what it costs.

`strict` has every worker compute the same bits from the same inputs, run after run. `fast` takes
what is quicker, and promises nothing. `plan_settings` says what is set, `settle` sets it, in a
worker, before anything touches the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

log = logging.getLogger(__name__)

Determinism = Literal["strict", "fast"]
"""See `TrainConfig.determinism`."""

_RANDOMNESS = "https://docs.pytorch.org/docs/2.13/notes/randomness.html"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_CUDA = "https://docs.pytorch.org/docs/2.13/notes/cuda.html"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One switch of torch or of a library under it, in both modes."""

    name: str
    """A switch of torch, or an environment variable (in capitals)."""
    strict: str | bool
    """Its value in `strict`."""
    fast: str | bool | None
    """Its value in `fast`; None: left as it is."""
    cuda_only: bool
    """It means nothing on a CPU."""
    reason: str
    """What would differ without it."""
    cost: str
    """What `strict` costs there."""
    source: str
    """Who says so."""

    @property
    def is_variable(self) -> bool:
        """Whether it is an environment variable."""
        return self.name.isupper()


SETTINGS = (
    Setting(
        name="deterministic_algorithms",
        strict=True,
        fast=False,
        cuda_only=False,
        reason="Sums by atomic additions come in any order. An operator with another way takes it, "
        "attention's backward included (cuDNN's attention has none, and is passed over); one "
        "without raises. torch.compile chooses no kernel by its time.",
        cost="attention's backward, and scatters and gathers in backward, are slower; "
        "torch.compile tunes nothing",
        source=_RANDOMNESS,
    ),
    Setting(
        name="fill_uninitialized_memory",
        strict=False,
        fast=False,
        cuda_only=False,
        reason="With deterministic algorithms torch fills all new memory, to show who reads it too "
        "early. Nobody does here, and each buffer would be written twice.",
        cost="nothing",
        source="https://docs.pytorch.org/docs/2.13/deterministic.html",
    ),
    Setting(
        name="cudnn_benchmark",
        strict=False,
        fast=True,
        cuda_only=True,
        reason="cuDNN's convolutions are chosen by their time, which differs from worker to "
        "worker.",
        cost="nothing, where the model has no convolutions",
        source=_RANDOMNESS,
    ),
    Setting(
        name="matmul_precision",
        strict="highest",
        fast="high",
        cuda_only=True,
        reason="TF32 is as repeatable as float32, but GPUs of other kinds have none. `fast` takes "
        "it, with 10 bits of mantissa for float32's 23.",
        cost="float32 products at up to an eighth of TF32's speed; nothing with "
        "precision='bfloat16'",
        source=_CUDA,
    ),
    Setting(
        name="cudnn_allow_tf32",
        strict=False,
        fast=True,
        cuda_only=True,
        reason="As above, for cuDNN's convolutions and recurrent layers, which have a switch of "
        "their own: torch leaves it on.",
        cost="float32 convolutions without the tensor cores; nothing, where the model has none",
        source=_CUDA,
    ),
    Setting(
        name="CUBLAS_WORKSPACE_CONFIG",
        strict=":4096:8",
        fast=None,
        cuda_only=True,
        reason="With several streams cuBLAS may take another workspace, and with it another "
        "kernel. With deterministic algorithms torch refuses products without it.",
        cost="24 MB of GPU memory",
        source="https://docs.nvidia.com/cuda/cublas/#results-reproducibility",
    ),
    Setting(
        name="NCCL_ALGO",
        strict="Ring",
        fast=None,
        cuda_only=True,
        reason="A tree adds in another order than a ring, and NCCL changes between them with size "
        "and machines.",
        cost="small sums in a replica of many nodes take longer",
        source=_NCCL,
    ),
    Setting(
        name="NCCL_PROTO",
        strict="simple",
        fast=None,
        cuda_only=True,
        reason="Protocols cut a message differently, so that other numbers meet in other channels.",
        cost="small sums take longer: up to some ten microseconds for each collective",
        source=_NCCL,
    ),
    Setting(
        name="NCCL_NVLS_ENABLE",
        strict="0",
        fast=None,
        cuda_only=True,
        reason="Sums in the NVLink switch differ from call to call.",
        cost="some of the bandwidth of sums inside a node, on H100 and later",
        source="https://github.com/NVIDIA/nccl/issues/1497",
    ),
)
"""In the order in which they are set."""


def plan_settings(
    determinism: Determinism, device: Literal["cpu", "cuda"]
) -> dict[str, str | bool]:
    """What is set in a worker: name -> value."""
    planned = {
        setting.name: setting.strict if determinism == "strict" else setting.fast
        for setting in SETTINGS
        if device == "cuda" or not setting.cuda_only
    }
    return {name: value for name, value in planned.items() if value is not None}


def attention_kernels(determinism: Determinism, device: Literal["cpu", "cuda"]) -> str:
    """What torch's attention may take, of which it chooses by shape and format. Source: torch,
    sdp_utils.cpp: cuDNN's is not taken with deterministic algorithms."""
    if device == "cpu":
        return "flash or math"
    return (
        "flash, efficient or math" if determinism == "strict" else "cudnn, flash, efficient or math"
    )


def settle(
    determinism: Determinism,
    device: Literal["cpu", "cuda"],
    environment: MutableMapping[str, str],
) -> None:
    """Sets it, in torch and in `environment`, over what is there. Called once in a process, before
    anything touches the GPU."""
    variables = {setting.name for setting in SETTINGS if setting.is_variable}
    for name, value in plan_settings(determinism, device).items():
        if name in variables:
            _set_variable(environment, name, str(value))
        else:
            _switches()[name](value)


def _set_variable(environment: MutableMapping[str, str], name: str, value: str) -> None:
    there = environment.get(name, value)
    if there != value:
        log.warning(
            "%s=%s is replaced by %s: train.determinism is 'strict'; with 'fast' it stays",
            name,
            there,
            value,
        )
    environment[name] = value


def _switches() -> dict[str, Callable[[Any], None]]:
    import torch
    import torch._inductor.config

    memory: Any = torch.utils.deterministic
    inductor: Any = torch._inductor.config

    def algorithms(on: bool) -> None:
        torch.use_deterministic_algorithms(on)
        # Inductor's own switch, which that sets, is for this thread alone since torch 2.13. On CUDA
        # backward is compiled on one of autograd's, and kernels would be chosen by their time.
        inductor._config["deterministic"].default = on

    def fill(on: bool) -> None:
        memory.fill_uninitialized_memory = on

    def benchmark(on: bool) -> None:
        torch.backends.cudnn.benchmark = on

    def allow_tf32(on: bool) -> None:
        torch.backends.cudnn.allow_tf32 = on

    return {
        "deterministic_algorithms": algorithms,
        "fill_uninitialized_memory": fill,
        "cudnn_benchmark": benchmark,
        "matmul_precision": torch.set_float32_matmul_precision,
        "cudnn_allow_tf32": allow_tf32,
    }
