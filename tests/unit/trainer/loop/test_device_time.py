"""Where a GPU's time went, by what the profiler saw there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from trainer.loop.device_time import DeviceTime, device_time

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(
    name: str, start_us: float, end_us: float, *, device: Any = DeviceType.CUDA, **other: Any
) -> SimpleNamespace:
    """As torch.profiler has them."""
    time_range = SimpleNamespace(start=start_us, end=end_us)
    seen: dict[str, Any] = {"is_user_annotation": False, **other}
    return SimpleNamespace(name=name, device_type=device, time_range=time_range, **seen)


def test_collectives_are_exposed_where_nothing_runs_beside_them() -> None:
    """On whichever streams; what the host does and annotations are no work of the device."""
    found = device_time(
        [
            event("gemm", 0, 1000),
            event(GATHER, 500, 1500),  # half of it
            event("Memcpy DtoH (Device -> Pinned)", 1400, 1450),  # but this
            event(GATHER, 1480, 2000),  # two of them count once
            event("softmax", 3000, 4000),
            event(GATHER, 3000, 4000),
            event("aten::mm", 1000, 9000, device=DeviceType.CPU),
            event("nccl:all_gather", 0, 9000, is_user_annotation=True),
        ]
    )
    assert found is not None
    assert vars(found) == pytest.approx({"busy_ms": 3.0, "collectives_ms": 2.5, "exposed_ms": 0.95})


def test_a_step_without_collectives_exposes_none_and_a_cpu_tells_nothing() -> None:
    alone = device_time([event("gemm", 0, 1000)])
    assert alone == DeviceTime(busy_ms=1.0, collectives_ms=0.0, exposed_ms=0.0)
    assert device_time([event("aten::mm", 0, 1, device=DeviceType.CPU)]) is None
