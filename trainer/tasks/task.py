"""What is learned: a model, its loss and its data.

Two tasks come with the package: `CausalLM` (`causal_lm.py`) and `CustomTask` (`custom.py`). The
driver calls `prepare`, which checks everything that can be wrong and leaves a `PreparedTask`; that
crosses to the workers, which build from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.data import SampleSource
    from trainer.models.init import WeightSource


class PreparedTask(Protocol):
    """A checked task, as it crosses to the workers. All workers call its methods with the same
    arguments."""

    @property
    def info(self) -> Mapping[str, Any]:
        """Facts for the run's records (token counts, vocabulary, …), JSON values."""
        ...

    def warm_up(self) -> None:
        """Does what makes `build` quick later; every worker calls it when it starts."""
        ...

    def build(self, seed: int) -> tuple[nn.Module, WeightSource]:
        """The model with its parameters on the meta device, and where their values come from."""
        ...

    def flops_per_token(self, model: nn.Module) -> Mapping[str, float]:
        """Operations for one token, forward and backward, of the whole `model`, by how they are
        counted (`trainer.models.flops`). A token is what `loss` counts."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """Sum of the losses of a batch (a scalar with gradient, in nats) and the number of targets
        in it."""
        ...

    def train_data(self) -> SampleSource:
        """The samples to learn from."""
        ...

    def eval_data(self) -> SampleSource | None:
        """The held-out samples, if any."""
        ...


class Task(Protocol):
    """What a user passes as `TrainConfig.task`."""

    def prepare(self, train: TrainConfig, cache_dir: str) -> PreparedTask:
        """Checks the task and makes its data ready. The driver calls it once, before anything
        starts.

        Args:
            train: the settings of the run.
            cache_dir: a directory that all nodes see, for prepared data.

        Raises:
            ConfigError: naming the field, the value and the fix.
        """
        ...


def default_cache_dir(storage_path: str) -> str:
    """Where prepared data goes when the user names no place: beside the runs, so that all nodes see
    it."""
    return str(Path(storage_path) / ".data")
