"""NVML as it is: a GPU that does its work is read, and gives no sign. What it has not is left out:
the rules are tested with stand-ins (tests/unit/health)."""

from __future__ import annotations

import time

import pytest
import torch

from health.gpu import Gpus, open_nvml
from health.judgement import judge
from health.xid_events import XidEvents

A_GPU_TELLS = {
    "utilization_percent",
    "power_w",
    "sm_clock_mhz",
    "temperature_c",
    "throttle_reasons",
    "pcie_replays",
    "memory_used_bytes",
}
"""Each GPU of a data centre; errors of memory and NVLinks not all of them."""


@pytest.mark.gpu
def test_a_gpu_that_works_is_read_and_gives_no_sign() -> None:
    pytest.importorskip("pynvml", reason="the extra gpu brings it")
    nvml = open_nvml()
    assert nvml is not None, "the driver does not let NVML in"
    gpus = Gpus(nvml)
    xids = XidEvents(nvml, gpus.handles)
    assert set(xids._sets) == set(gpus.handles), "the driver lets no events be registered"
    numbers = torch.randn(2048, 2048, device="cuda")
    readings = []
    for _ in range(3):
        (numbers @ numbers).sum().item()
        readings += gpus.read(time.monotonic())
    by_gpu = {one.of: [r for r in readings if r.of == one.of] for one in readings}
    assert len(by_gpu) == nvml.nvmlDeviceGetCount()
    for address, series in by_gpu.items():
        assert len(series) == 3
        assert (series[-1].values["lost"], series[-1].values["unanswered"]) == (0.0, 0.0)
        assert set(series[-1].values) >= A_GPU_TELLS, address
    assert judge({("gpu", of): series for of, series in by_gpu.items()}, "n1", 7.0) == []
    assert {one.of for one in xids.read(time.monotonic())} <= {*by_gpu}  # others may share it
    for events in xids._sets.values():
        with pytest.raises(nvml.NVMLError_Timeout):
            nvml.nvmlEventSetWait_v2(events, 0)
