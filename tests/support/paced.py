"""A task for runs with many faults: slow while it must be, and only then.

A step of a tiny model takes a few milliseconds, a heal takes as long as the machine has work for
others. So that faults find the replicas whole, samples keep a worker waiting for a while when the
newest roster has a replica without lanes or lacks one. And they wait for as long as a file stands,
so that a test can do something in the middle of a run.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.data import SampleSource
from trainer.tasks.causal_lm import CausalLM, PreparedCausalLM

_LOOK_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When samples wait."""

    events: str
    """The run's events.jsonl."""
    pause: str
    """A file: while it stands, nobody gets samples."""
    replicas: int
    """Replicas of the whole run."""
    patience_s: float
    """The longest wait of a batch for the run to be whole; 0: none."""
    evaluated_sample_s: float = 0.0
    """How long a held-out sample takes."""

    def wait(self) -> None:
        """Called before each batch."""
        until = time.monotonic() + self.patience_s
        while time.monotonic() < until and not self._settled():
            time.sleep(_LOOK_S)
        while Path(self.pause).exists():
            time.sleep(_LOOK_S)

    def _settled(self) -> bool:
        """Whether all replicas train, or all that can have caught up and are called to."""
        for line in reversed(Path(self.events).read_bytes().splitlines()):
            if b'"replica_healed"' in line:
                return True
            if b'"regroup_done"' in line:
                lanes = json.loads(line)["lanes"]
                return len(lanes) == self.replicas and all(lanes.values())
        return True


@dataclass(frozen=True, kw_only=True)
class PacedLM:
    """A Task: another one, paced."""

    task: CausalLM
    """What is learned."""
    pace: Pace
    """When samples wait."""

    @property
    def seq_len(self) -> int:
        """Tokens in a sample."""
        return self.task.seq_len

    def prepare(self, train: TrainConfig, cache_dir: str) -> PreparedPacedLM:
        """See Task."""
        prepared = self.task.prepare(train, cache_dir)
        return PreparedPacedLM(**vars(prepared), pace=self.pace)


@dataclass(frozen=True, kw_only=True)
class PreparedPacedLM(PreparedCausalLM):
    """See PacedLM."""

    pace: Pace
    """When samples wait."""

    def train_data(self) -> SampleSource:
        """See PreparedTask."""
        return PacedData(super().train_data(), self.pace)

    def eval_data(self) -> SampleSource | None:
        """See PreparedTask."""
        data = super().eval_data()
        return None if data is None else SlowData(data, self.pace.evaluated_sample_s)


class PacedData:
    """Samples that keep a worker waiting while the roster asks for it."""

    def __init__(self, data: SampleSource, pace: Pace) -> None:
        self._data, self._pace = data, pace

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, ids: Any) -> Any:
        """See SampleSource."""
        self._pace.wait()
        return self._data.batch(ids)


class SlowData:
    """Samples that take their time."""

    def __init__(self, data: SampleSource, sample_s: float) -> None:
        self._data, self._sample_s = data, sample_s

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, ids: Any) -> Any:
        """See SampleSource."""
        time.sleep(self._sample_s * len(ids))
        return self._data.batch(ids)


def paced_task(
    task: CausalLM,
    storage: Path,
    name: str,
    replicas: int,
    patience_s: float,
    evaluated_sample_s: float = 0.0,
) -> PacedLM:
    """The task of run `name` below `storage`."""
    pace = Pace(
        events=str(storage / name / "events.jsonl"),
        pause=str(storage / f"{name}.pause"),
        replicas=replicas,
        patience_s=patience_s,
        evaluated_sample_s=evaluated_sample_s,
    )
    return PacedLM(task=task, pace=pace)
