"""Numbers for Prometheus, through Ray: each node's own endpoint shows them, as `ray_NAME`."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Gauge


class Gauges:
    """Gauges of this process, made as they are first set.

    Args:
        tags: labels that all of them have, with their values.
    """

    def __init__(self, tags: Mapping[str, str]) -> None:
        self._tags = dict(tags)
        self._gauges: dict[str, Gauge] = {}

    def set(self, name: str, value: float, tags: Mapping[str, str], what: str) -> None:
        """Sets a gauge. Ray exports a value once, and forgets it within 20 s: set it again and
        again.

        Args:
            name: of the metric; it always has the same labels.
            value: its value.
            tags: its labels beside the common ones.
            what: what it is, for those who read the endpoint.
        """
        if name not in self._gauges:
            keys = (*self._tags, *tags)
            self._gauges[name] = Gauge(name, description=what, tag_keys=keys)
        self._gauges[name].set(value, {**self._tags, **tags})
