"""Xid errors as the driver tells them itself, by NVML's events: where the kernel's log may not be
read, and beside it, for nobody can write one by hand.

A call may block where a GPU is gone, as all of NVML (`gpu.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from health.reading import Reading

log = logging.getLogger(__name__)

_MOST_EVENTS = 100
"""Of a GPU at one look: what a storm leaves behind is read with the next ones."""


class XidEvents:
    """The Xid errors of GPUs from its construction on, or from when they could be reached.

    A set of events for each GPU: which one an event is of is then known without a question to a
    driver that may have lost it.

    Args:
        nvml: the module, from `open_nvml`.
        gpus: address -> handle, of those that could be reached so far: more may come.
    """

    def __init__(self, nvml: ModuleType, gpus: Mapping[str, Any]) -> None:
        self._nvml, self._gpus = nvml, gpus
        self._opened: set[str] = set()
        """GPUs that were asked for their events, once each: some have none."""
        self._sets: dict[str, Any] = {}
        self._failed: set[str] = set()
        """GPUs of which an error was told: once each."""
        self._open_new()

    def _open_new(self) -> None:
        for address in [one for one in self._gpus if one not in self._opened]:
            events = self._open(self._gpus[address])
            self._opened.add(address)
            if events is not None:
                self._sets[address] = events

    def _open(self, handle: Any) -> Any:
        """The events of a GPU; None where this GPU, driver or package of NVML has none."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except (nvml.NVMLError, AttributeError):
            return None
        return events

    def read(self, at_s: float) -> list[Reading]:
        """A reading for each GPU that had some since the last call: number of the Xid -> times.
        Does not wait.

        Args:
            at_s: now, on the monotonic clock.
        """
        self._open_new()
        found = {address: Counter(self._take(address)) for address in self._sets}
        return [
            Reading(kind="xid", of=address, at_s=at_s, values={str(x): float(n[x]) for x in n})
            for address, n in found.items()
            if n
        ]

    def _take(self, address: str) -> Iterator[int]:
        """The Xids that wait in a GPU's set. An error is told of and no more: those before it, and
        the other GPUs', count."""
        nvml = self._nvml
        for _ in range(_MOST_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._sets[address], 0)
            except AttributeError:  # an older package
                return
            except (nvml.NVMLError_Timeout, nvml.NVMLError_GpuIsLost):  # none is left
                return
            except nvml.NVMLError as error:
                if address not in self._failed:
                    self._failed.add(address)
                    log.warning("GPU %s: NVML gives no Xid events: %r", address, error)
                return
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                yield int(event.eventData)
