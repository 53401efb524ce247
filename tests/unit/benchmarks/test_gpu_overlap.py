"""How much of the copying a trace shows to be hidden."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch._C._autograd import DeviceType

from benchmarks._gpu_overlap import hidden_share

TO_HOST, TO_DEVICE = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"


def event(
    name: str, start: float, end: float, *, device: Any = DeviceType.CUDA, annotation: bool = False
) -> SimpleNamespace:
    """As torch.profiler has them; microseconds."""
    time_range = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, device_type=device, time_range=time_range, is_user_annotation=annotation
    )


def test_copies_are_hidden_while_a_kernel_runs() -> None:
    """Kernels on two streams count once; one that ran on the host, an annotation, a copy beside it
    and one from memory that is not pinned do not count."""
    share = hidden_share(
        [
            event("gemm", 0, 10),
            event("softmax", 5, 15),
            event(TO_HOST, 5, 20),  # ten of fifteen
            event(TO_DEVICE, 18, 23),  # none
            event("gemm", 30, 40),
            event(TO_DEVICE, 29, 41),  # ten of twelve
            event("aten::mm", 15, 30, device=DeviceType.CPU),
            event("FSDP::all_gather", 15, 30, annotation=True),
            event("Memset (Device)", 15, 30),
            event("Memcpy DtoH (Device -> Pageable)", 50, 90),
        ]
    )
    assert share == 20 / 32


def test_a_step_without_copies_has_no_share() -> None:
    assert hidden_share([event("gemm", 0, 10)]) is None
