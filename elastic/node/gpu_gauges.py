"""What a node's GPUs show, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.ray_compat.gauges import Gauges
from health.reading import Reading


class GpuGauges:
    """A gauge for each value of `health/gpu.py`, by its name: `elastic_gpu_temperature_c`.

    Args:
        node: Ray's id of this node.
    """

    def __init__(self, node: str) -> None:
        self._gauges = Gauges({"node": node})

    def show(self, readings: Iterable[Reading]) -> None:
        """Sets those of GPUs among `readings`."""
        for reading in readings:
            if reading.kind != "gpu":
                continue
            for name, value in reading.values.items():
                what = f"What NVML tells of a GPU, by its PCI address or index: {name}."
                self._gauges.set(f"elastic_gpu_{name}", value, {"gpu": reading.of}, what)
