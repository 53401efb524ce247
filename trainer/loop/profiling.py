"""A profile of some steps on one worker, by torch's profiler: a trace, and where the time went.

While the trace is written, between two steps, the other workers wait: the loop is in the phase
`profile` then, which is none of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from trainer.config import Steps
from trainer.loop.device_time import DeviceTime, device_time

MOST_OPERATORS = 12

_ATTENTION = re.compile(r"aten::_scaled_dot_product_(?:attention_)?(cudnn|flash|efficient|math)")


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What one operator took in all profiled steps, those that it calls left out."""

    name: str
    calls: int
    cpu_ms: float
    """On the host."""
    gpu_ms: float
    """Of its kernels; 0 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What became of a profile."""

    first: int
    """The first step that it holds."""
    last: int
    """The last one."""
    file: str
    """The trace, in Chrome's format, on the node of the worker."""
    problem: str | None
    """Why it lacks steps, or is not there."""
    operators: tuple[Operator, ...]
    """The dearest ones, first those with most time on the GPU, or on the host without one."""
    attention: tuple[str, ...]
    """The kernels that `scaled_dot_product_attention` has chosen: `cudnn`, `flash`, `efficient`,
    `math`."""
    device: DeviceTime | None
    """Of all profiled steps; None on a CPU."""


class StepProfiler:
    """Profiles those of `steps` that its generation does whole. Where another one did the first of
    them, or will do the last, it says so.

    Args:
        steps: which.
        folder: where the trace goes; made when it is missing.
        worker: in the name of the trace.
        on_cuda: whether there is a GPU to look at.
        tell: gets what became of it.
    """

    def __init__(
        self,
        steps: Steps,
        folder: Path,
        worker: str,
        *,
        on_cuda: bool,
        tell: Callable[[Profile], None],
    ) -> None:
        self._steps, self._folder, self._worker = steps, folder, worker
        self._on_cuda, self._tell = on_cuda, tell
        self._running: profile | None = None
        self._first = 0

    @property
    def running(self) -> bool:
        """Whether steps are being profiled now."""
        return self._running is not None

    def begin(self, step: int) -> None:
        """Called before each step."""
        if self._running is None and self._steps.first <= step <= self._steps.last:
            self._start(step)

    def is_last(self, step: int) -> bool:
        """Whether no step after this one is to be profiled."""
        return step >= self._steps.last

    def end(self, step: int) -> None:
        """Ends what is being profiled, if anything is. `step` is not done yet."""
        if self._running is None:
            return
        running, self._running = self._running, None
        running.__exit__(None, None, None)
        first, last = self._first, min(step - 1, self._steps.last)
        if last < first:
            return  # the next generation begins with the same step
        file = self._folder / f"steps-{first}-{last}-{self._worker}.json.gz"
        problem = None
        if (first, last) != (self._steps.first, self._steps.last):
            problem = f"its roster did no more of {self._steps.first} to {self._steps.last}"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(file))
        except OSError as error:
            problem = f"the trace cannot be written: {error}"
        averages = running.key_averages()
        self._tell(
            Profile(
                first=first,
                last=last,
                file=str(file),
                problem=problem,
                operators=_dearest(averages, self._on_cuda),
                attention=attention_kernels(entry.key for entry in averages),
                device=device_time(running.events() or ()) if self._on_cuda else None,
            )
        )

    def _start(self, step: int) -> None:
        cuda = [ProfilerActivity.CUDA] if self._on_cuda else []
        self._running, self._first = profile(activities=[ProfilerActivity.CPU, *cuda]), step
        self._running.__enter__()


def attention_kernels(operators: Iterable[str]) -> tuple[str, ...]:
    """Those that `scaled_dot_product_attention` has chosen, by the names of operators."""
    return tuple(sorted({found[1] for name in operators if (found := _ATTENTION.match(name))}))


def _dearest(averages: Any, on_cuda: bool) -> tuple[Operator, ...]:
    found = [
        Operator(
            name=entry.key,
            calls=entry.count,
            cpu_ms=entry.self_cpu_time_total / 1e3,
            gpu_ms=entry.self_device_time_total / 1e3,
        )
        for entry in averages
    ]
    found.sort(key=lambda o: o.gpu_ms if on_cuda else o.cpu_ms, reverse=True)
    return tuple(found[:MOST_OPERATORS])
