"""NVIDIA GPUs by NVML, where its Python package is installed (extra `gpu`) and a driver
is there.

A GPU that cannot be reached any more may hold up a call into the driver for long: call this on a
thread that nobody waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from types import ModuleType
from typing import Any

from health.reading import UNREACHED, Reading

_LINK_ERRORS = (
    "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    (
        "NVML_NVLINK_ERROR_DL_REPLAY",
        "NVML_NVLINK_ERROR_DL_CRC_FLIT",
        "NVML_NVLINK_ERROR_DL_CRC_DATA",
    ),
)
_LINK_RECOVERIES = (
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
    ("NVML_NVLINK_ERROR_DL_RECOVERY",),
)
"""A field of each NVLink, and the counters that stand for it where there is none."""

_BASIC = frozenset({"utilization_percent", "sm_clock_mhz", "temperature_c"})
"""What a GPU goes on telling for as long as it works."""

_RESET_REQUIRED = 1.0
"""The recovery action of that name (`xids.py`): some drivers say it by an error alone."""


def open_nvml() -> ModuleType | None:
    """NVML, ready to be asked; None where there is none."""
    return try_nvml()[0]


def try_nvml() -> tuple[ModuleType | None, str]:
    """As `open_nvml`, and why it does not start, in its words; "" where its package is missing.
    One that starts and cannot count its GPUs has not started."""
    try:
        import pynvml
    except ImportError:
        return None, ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error)
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        close_nvml(pynvml)
        return None, str(error)
    return pynvml, ""


def close_nvml(nvml: ModuleType) -> None:
    """Takes back one start of NVML, which counts them: what it holds, it holds until the last."""
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def bus_address(bus_id: str) -> str:
    """A PCI address as NVML gives it, "00000000:9B:00.0", in the form of the kernel's log,
    "0000:9b:00"."""
    domain, bus, device = bus_id.lower().split(":")
    return f"{domain[-4:]}:{bus}:{device.split('.')[0]}"


def keep_our_pids(readings: Sequence[Reading], ours: Set[int]) -> Sequence[Reading]:
    """Readings of one look in a container with process numbers of its own: there many drivers give
    the machine's (NVIDIA/nvidia-docker#1483), and one of those may be a worker's by chance. So the
    processes on GPUs are left out, unless all of them are ours.

    Args:
        readings: of all GPUs, and of other things.
        ours: processes that are known here.
    """
    if {pid for one in readings if one.kind == "gpu" for pid in one.pids} <= ours:
        return readings
    return [replace(one, pids=()) if one.kind == "gpu" else one for one in readings]


class Gpus:
    """A machine's GPUs.

    Args:
        nvml: the module, from `open_nvml`.
    """

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._unreached: dict[int, dict[str, float]] = {}
        """NVML's number of a GPU -> what is told of it."""
        for index in range(nvml.nvmlDeviceGetCount()):
            self._open(index)
        self._answered: set[str] = set()
        """GPUs that have answered one of `_BASIC`."""
        self._reset_required = False
        """A question of the GPU that is read was refused so."""
        self._asked_singly: dict[tuple[str, str], list[int]] = {}
        """(GPU, field) -> the NVLinks of which each is asked for itself; none where the field tells
        of them. Found out once there is a number, as each look reads them."""

    @property
    def handles(self) -> Mapping[str, Any]:
        """Address -> handle, of those that could be reached so far."""
        return self._handles

    def _open(self, index: int) -> None:
        """Takes in a GPU, or what is told of it for as long as it cannot be reached."""
        nvml = self._nvml
        self._unreached.pop(index, None)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
        except nvml.NVMLError_NoPermission:  # another job's or container's, which NVML counts
            return
        except nvml.NVMLError_GpuIsLost:
            self._unreached[index] = {"lost": 1.0}
        except nvml.NVMLError:
            self._unreached[index] = {"lost": 0.0, "unanswered": 1.0}
        else:
            address = bus_address(bus_id.decode() if isinstance(bus_id, bytes) else bus_id)
            self._handles[address] = handle

    def read(self, at_s: float) -> list[Reading]:
        """A reading for each GPU. What one does not have is left out. `lost` is 1 for one that
        cannot be reached any more, and nothing else is read then; `unanswered` for one that has
        answered and answers none of `_BASIC` now. One that was not reached so far has one of the
        two; it is tried again each time, and called by NVML's number, "index 3".

        Args:
            at_s: now, on the monotonic clock.
        """
        for index in list(self._unreached):
            self._open(index)
        unreached = [
            Reading(kind="gpu", of=f"{UNREACHED}{index}", at_s=at_s, values=values)
            for index, values in self._unreached.items()
        ]
        return unreached + [self._read(*gpu, at_s) for gpu in self._handles.items()]

    def _read(self, address: str, handle: Any, at_s: float) -> Reading:
        values: dict[str, float] = {"lost": 0.0, "unanswered": 0.0}
        pids: tuple[int, ...] = ()
        self._reset_required = False
        try:
            for names, ask in self._questions(address, handle).items():
                answer = self._ask(ask)
                if answer is not None:
                    values |= zip(names, map(float, answer), strict=True)
            processes = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            pids = tuple(process.pid for process in processes or ())
        except self._nvml.NVMLError_GpuIsLost:
            return Reading(kind="gpu", of=address, at_s=at_s, values={"lost": 1.0})
        if self._reset_required:
            values["recovery_action"] = max(_RESET_REQUIRED, values.get("recovery_action", 0.0))
        elif values.keys() & _BASIC:
            self._answered.add(address)
        else:
            values["unanswered"] = float(address in self._answered)
        return Reading(kind="gpu", of=address, at_s=at_s, values=values, pids=pids)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The answer; None where this GPU, this driver or this package of NVML does not have it."""
        try:
            return question()
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError_ResetRequired:
            self._reset_required = True
            return None
        except (self._nvml.NVMLError, AttributeError):  # an older package lacks the question
            return None

    def _questions(self, address: str, handle: Any) -> dict[tuple[str, ...], Callable[[], Any]]:
        """What to ask, by the names of what is answered."""
        nvml = self._nvml
        uncorrected, corrected = (
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        )
        volatile, aggregate = nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC

        def errors(kind: int, counter: int) -> Callable[[], Any]:
            return lambda: (nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter),)

        return {
            ("utilization_percent",): lambda: (nvml.nvmlDeviceGetUtilizationRates(handle).gpu,),
            ("power_w",): lambda: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000,),
            ("sm_clock_mhz",): lambda: (nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),),
            ("throttle_reasons",): lambda: (nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),),
            ("temperature_c",): lambda: (
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            ("memory_used_bytes",): lambda: (nvml.nvmlDeviceGetMemoryInfo(handle).used,),
            ("ecc_uncorrected_volatile",): errors(uncorrected, volatile),
            ("ecc_uncorrected_aggregate",): errors(uncorrected, aggregate),
            ("ecc_corrected_volatile",): errors(corrected, volatile),
            ("remap_pending", "remap_failed"): lambda: nvml.nvmlDeviceGetRemappedRows(handle)[2:],
            ("pcie_replays",): lambda: (nvml.nvmlDeviceGetPcieReplayCounter(handle),),
            ("nvlink_errors",): lambda: self._over_links(address, handle, *_LINK_ERRORS),
            ("nvlink_recoveries",): lambda: self._over_links(address, handle, *_LINK_RECOVERIES),
            ("recovery_action",): self._field(handle, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        }

    def _field(self, handle: Any, field: str) -> Callable[[], Any]:
        return lambda: self._sum(handle, [getattr(self._nvml, field)])

    def _over_links(
        self, address: str, handle: Any, field: str, counters: Sequence[str]
    ) -> tuple[int] | None:
        """Of all NVLinks: by a field, which only those of Blackwell and later have, or by counters
        of each link, which only those before have.

        Source: https://docs.nvidia.com/deploy/nvml-api/latest/change-log.html
        """
        key = (address, field)
        links, told = self._asked_singly.get(key), None
        if not links:
            told = self._ask(lambda: self._over_field(handle, field))
        if links or (links is None and told is None):
            links = links or self._active_links(handle)
            told = self._over_counters(handle, links, counters)
        if told is not None:
            self._asked_singly[key] = links or []
        return told

    def _over_counters(
        self, handle: Any, links: Sequence[int], counters: Sequence[str]
    ) -> tuple[int] | None:
        answers = [self._ask_link(handle, link, name) for link in links for name in counters]
        found = [answer for answer in answers if answer is not None]
        return (sum(found),) if found else None

    def _active_links(self, handle: Any) -> list[int]:
        def is_active(link: int) -> bool:
            state = self._ask(lambda: self._nvml.nvmlDeviceGetNvLinkState(handle, link))
            return bool(state == self._nvml.NVML_FEATURE_ENABLED)

        return [link for link in range(self._nvml.NVML_NVLINK_MAX_LINKS) if is_active(link)]

    def _ask_link(self, handle: Any, link: int, counter: str) -> int | None:
        nvml = self._nvml
        answer: int | None = self._ask(
            lambda: nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, getattr(nvml, counter))
        )
        return answer

    def _over_field(self, handle: Any, field: str) -> tuple[int] | None:
        """Of a field that each NVLink has: without a link's number NVML answers for link 0."""
        links = range(self._nvml.NVML_NVLINK_MAX_LINKS)
        return self._sum(handle, [(getattr(self._nvml, field), link) for link in links])

    def _sum(self, handle: Any, asked: Sequence[Any]) -> tuple[int] | None:
        """Of what there is of them."""
        nvml = self._nvml
        values = nvml.nvmlDeviceGetFieldValues(handle, asked)
        found = [_number(v, nvml) for v in values if v.nvmlReturn == nvml.NVML_SUCCESS]
        return (sum(found),) if found else None


def _number(value: Any, nvml: ModuleType) -> int:
    """A field's value, which says itself of which type it is."""
    if value.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return int(value.value.uiVal)
    return int(value.value.ullVal)
