"""What a process does on its device before it has a place, so that a spare takes one sooner."""

from __future__ import annotations

import torch

from trainer.backend.groups import Device, torch_device


def warm_device(device: Device) -> None:
    """Has what a rehearsal would wait for: on CUDA the context, cuBLAS with its workspace, the
    first kernels, and the allocator's first memory. Every worker calls it when it starts."""
    numbers = torch.zeros(64, 64, device=torch_device(device))
    for kind in (torch.float32, torch.bfloat16):
        product = numbers.to(kind) @ numbers.to(kind)
        product.sum().item()
