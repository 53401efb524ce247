"""Whether the GPU of a worker can compute what is asked of it. Each worker asks its own: a cluster
may have several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

BFLOAT16 = (8, 0)
"""The oldest compute capability that computes in bfloat16."""
FLOAT8 = (8, 9)
"""And that multiplies in 8 bits."""

_OF_KINDS = {
    "K80": (3, 7),
    "P100": (6, 0),
    "P4": (6, 1),
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A100-40G": (8, 0),
    "A100-80G": (8, 0),
    "A10G": (8, 6),
}
"""Ray's name of a GPU -> its compute capability, of those that cannot do all."""

_KNOWN = {BFLOAT16: "A100, L4, H100, H200", FLOAT8: "L4, H100, H200"}


def all_older(kinds: Sequence[str], oldest: tuple[int, int]) -> bool:
    """Whether each GPU of a cluster has less than a compute capability. Pure.

    Args:
        kinds: Ray's names of them. Of one that is not known nothing is said.
        oldest: what is needed.
    """
    return bool(kinds) and all(_OF_KINDS.get(kind, oldest) < oldest for kind in kinds)


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
