"""The tiny task on workers that share a GPU: its part of a run's workers imports this module."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tests.support.fabric import share_a_gpu
from tests.support.tiny import tiny_task
from trainer.tasks.causal_lm import PreparedCausalLM


class OnSharedGpus:
    """The tiny task, whose workers may share a GPU."""

    def __init__(self, text: Path) -> None:
        self._task = tiny_task(text)

    def prepare(self, train: Any, cache_dir: str) -> PreparedOnSharedGpus:
        """See Task."""
        prepared = self._task.prepare(train, cache_dir)
        return PreparedOnSharedGpus(
            **{field.name: getattr(prepared, field.name) for field in fields(prepared)}
        )


@dataclass(frozen=True, kw_only=True)
class PreparedOnSharedGpus(PreparedCausalLM):
    """Tells NCCL so, before a worker makes its first group."""

    def warm_up(self) -> None:
        """See PreparedTask."""
        os.environ.update(share_a_gpu(os.getpid()))
        super().warm_up()
