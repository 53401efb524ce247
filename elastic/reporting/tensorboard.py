"""The run's curves for TensorBoard, written from the same records as the run's logs.

torch is imported for the first point, not with this module: reading a report needs no torch.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.protocol.events import Evaluated, Event, StepRecord
from elastic.reporting.callback import Callback
from elastic.reporting.report import Report

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FLUSH_S = 1
"""How long a point may wait until it is in the file. It waits only where TensorFlow is installed:
tensorboard then writes through it, and it buffers."""


class TensorBoardLog(Callback):
    """Writes loss, grad_norm, lr, tokens_per_s, replicas and val_loss over the steps.

    When the run goes back to an earlier step, or is continued, TensorBoard drops the curves from
    that step on and shows what was done instead.

    Args:
        log_dir: directory of the event files; made when it is missing.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._log_dir = os.fspath(log_dir)
        self._writer: SummaryWriter | None = None
        self._last: StepRecord | None = None

    def written_until(self) -> float:
        """When the newest point was written, in seconds since the epoch, by the clock of the file
        system; -inf: there is none."""
        files = Path(self._log_dir).glob("events.out.tfevents.*")
        return max((file.stat().st_mtime for file in files), default=-math.inf)

    def on_step(self, record: StepRecord) -> None:
        """Write a point of each curve."""
        if self._last is not None and record.step <= self._last.step:
            self._close()
            self._last = None
        writer = self._writer_from(record.step)
        for name, value in _scalars(record, self._last).items():
            writer.add_scalar(name, value, record.step, walltime=record.time)
        self._last = record

    def on_event(self, event: Event) -> None:
        """Write a validation loss."""
        if isinstance(event, Evaluated):
            self._writer_from(event.step).add_scalar(
                "val_loss", event.val_loss, event.step, walltime=event.time
            )

    def on_end(self, report: Report) -> None:
        """Close the files."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _writer_from(self, step: int) -> SummaryWriter:
        """The open writer, or a new one that voids what earlier ones wrote from `step` on."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._log_dir, purge_step=step, flush_secs=_FLUSH_S)
        return self._writer


def _scalars(record: StepRecord, last: StepRecord | None) -> dict[str, float]:
    scalars = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "replicas": float(record.replicas),
    }
    if last is not None and record.time > last.time:
        scalars["tokens_per_s"] = record.tokens / (record.time - last.time)
    return scalars
