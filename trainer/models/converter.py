"""Model converters: what changes a model between its building and its splitting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.models.init import WeightSource


class ModelConverter(Protocol):
    """Changes a model: freezes parameters, wraps blocks, replaces layers.

    The driver and every worker call it, so it must be picklable, importable on the workers, and do
    the same everywhere. It is no part of the run's identity: a run goes on from a checkpoint where
    the converted model has the same tensors, with the same shapes and dtypes.
    """

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        """The model to train, and where its initial weights come from.

        Args:
            model: the whole model, parameters on the meta device; tensor parallelism and FSDP2
                come later. It may be changed in place.
            source: gives the values of its parameters, by name. A converter that adds parameters
                or renames them returns a source that knows the new names.
        """
        ...


@runtime_checkable
class CheckedConverter(ModelConverter, Protocol):
    """A converter that does not go with every run."""

    def check(self, model: nn.Module, train: Any, device: torch.device | None) -> None:
        """Called on the driver and on every worker, after all converters.

        Args:
            model: converted, whole, parameters on the meta device.
            train: the run's TrainConfig.
            device: the worker's; None on the driver, which may have another machine's.

        Raises:
            ConfigError: the run cannot have it.
        """
        ...
