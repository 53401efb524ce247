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
    """Why it lacks the first steps, or is not there."""
    operators: tuple[Operator, ...]
    """The dearest ones, first those with most time on the GPU, or on the host without one."""
    attention: tuple[str, ...]
    """The kernels that `scaled_dot_product_attention` has chosen: `cudnn`, `flash`, `efficient`,
    `math`."""
    device: DeviceTime | None
    """Of all profiled steps; None on a CPU."""


class StepProfiler:
    """Profiles those of `steps` that its generation does, if that does them to the last. Where
    another one did the first of them, it says so.

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
        """Whether `step` is the last one of those that are being profiled."""
        return self.running and step == self._steps.last

    def drop(self) -> None:
        """Lets go of what is being profiled, if anything is: its generation has ended. Waits for
        the device. To stop takes a twentieth of the time that it would take to write."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)

    def end(self) -> None:
        """Writes and tells what was profiled. Called after the last step."""
        running = self._running
        assert running is not None
        self.drop()
        first, last = self._first, self._steps.last
        file = self._folder / f"steps-{first}-{last}-{self._worker}.json.gz"
        problem = None
        if first != self._steps.first:
            problem = (
                f"steps {self._steps.first} to {first - 1} are not in it: its roster began later"
            )
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
