"""Whether the GPU of a worker can compute what is asked of it. Each worker asks its own: a cluster
may have several kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

BFLOAT16 = (8, 0)
"""The oldest compute capability that computes in bfloat16."""
FLOAT8 = (8, 9)
"""And that multiplies in 8 bits."""

_KNOWN = {BFLOAT16: "A100, L4, H100, H200", FLOAT8: "L4, H100, H200"}


def check_capability(
    device: torch.device,
    oldest: tuple[int, int],
    *,
    field: str,
    value: object,
    what: str,
    fix: str,
) -> None:
    """Called on a worker. A CPU can all of it, slowly; a dry run has another machine's GPU.

    Args:
        device: the worker's.
        oldest: compute capability that is needed.
        field: the setting that asks for it.
        value: what that is.
        what: what needs it, in words.
        fix: what to write instead.

    Raises:
        ConfigError: the GPU is older.
    """
    import torch
    from torch._guards import detect_fake_mode

    if device.type != "cuda" or detect_fake_mode() is not None:
        return
    found = torch.cuda.get_device_capability(device)
    if found < oldest:
        raise ConfigError(
            field,
            value,
            f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, "
            f"and {what} needs {oldest[0]}.{oldest[1]} or more ({_KNOWN[oldest]})",
            fix,
        )
