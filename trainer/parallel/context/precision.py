"""Whether a device has a kernel for the blocks of a ring. Pure."""

from __future__ import annotations

from trainer.errors import ConfigError

_WITHOUT = "train.parallel.context = 1 and texts='joined'"


def check_kernel(device: str, precision: str, head_dim: int | None) -> None:
    """Raises ConfigError where the device has no kernel for these numbers.

    Args:
        device: "cpu" or "cuda".
        precision: of the computation.
        head_dim: size of a head; None: unknown.
    """
    if device != "cuda":
        return
    if precision != "bfloat16":
        raise ConfigError(
            "train.precision",
            precision,
            "context parallelism and texts apart compute in bfloat16 on a GPU, by FlashAttention",
            f"Use 'bfloat16', or {_WITHOUT}",
        )
    if head_dim is not None and (head_dim % 8 or head_dim > 256):
        raise ConfigError(
            "train.parallel.context",
            f"heads of {head_dim}",
            "FlashAttention takes heads of a multiple of 8, up to 256",
            f"Use {_WITHOUT}",
        )
