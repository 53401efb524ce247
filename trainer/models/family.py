"""Model families: what the trainer must know of an architecture, in one object.

`HUGGING_FACE` serves every decoder of transformers. An architecture that needs something else has a
family of its own: a subclass of `ModelFamily`, registered by the architecture's name. The driver
looks it up once; the object travels to the workers with the prepared task, so it must be picklable,
and its module importable there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.models import hf

if TYPE_CHECKING:
    from torch import nn

    from trainer.models.init import WeightSource


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Any Hugging Face decoder; a subclass replaces what is different in its own."""

    divided: tuple[str, ...] = (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    """Numbers of the configuration that the tensor degree must divide, where they are there."""

    def build_on_meta(self, config: Mapping[str, Any]) -> nn.Module:
        """The model with its parameters on the meta device and its buffers on the CPU.

        Raises:
            ConfigError: the configuration does not make a model.
        """
        return hf.build_on_meta(config)

    def weights(
        self, config: Mapping[str, Any], model: nn.Module, seed: int, pretrained_path: str | None
    ) -> WeightSource:
        """Where the initial weights of `model` come from: files in a directory, or the seed. Sets
        the buffers that the files hold."""
        return hf.weights(config, model, seed, pretrained_path)

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        """Patterns of module names -> styles (`trainer.parallel.check.SUPPORTED_STYLES`); empty
        where the model cannot be split over tensor ranks."""
        plan: dict[str, str] | None = getattr(model, "tp_plan", None)
        return plan or {}

    def blocks(self, model: nn.Module) -> list[str]:
        """Names of the repeated blocks: the elements of the longest ModuleList, or [] where there
        is none."""
        from torch import nn

        named = model.named_modules()
        lists = [(len(m), name) for name, m in named if isinstance(m, nn.ModuleList)]
        if not lists:
            return []
        count, name = max(lists, key=lambda entry: entry[0])
        return [f"{name}.{index}" for index in range(count)]

    def ends(self, model: nn.Module) -> list[str]:
        """Names of the embedding and the head, where each has parameters of its own: with a large
        vocabulary they are large, and not needed at the same time."""
        if self.tied(model) or not hasattr(model, "get_output_embeddings"):
            return []
        names = {id(module): name for name, module in model.named_modules()}
        network: Any = model
        found = (network.get_input_embeddings(), network.get_output_embeddings())
        return [names[id(end)] for end in found if end is not None]

    def tied(self, model: nn.Module) -> list[tuple[str, str]]:
        """Pairs of names of one parameter: the first one, and another."""
        seen: dict[int, str] = {}
        return [
            (seen[id(param)], name)
            for name, param in model.named_parameters(remove_duplicate=False)
            if seen.setdefault(id(param), name) != name
        ]


HUGGING_FACE = ModelFamily()
"""The family of an architecture that has none of its own, and of a custom model."""

_FAMILIES: dict[str, ModelFamily] = {}


def register_family(architecture: str, family: ModelFamily) -> None:
    """Says which family an architecture is of; in the driver's process, before the run starts.

    Raises:
        ConfigError: it has another one already.
    """
    if _FAMILIES.setdefault(architecture, family) != family:
        raise ConfigError(
            "train.task.model.architecture",
            architecture,
            f"it is registered with {_FAMILIES[architecture]!r} already",
            "Register a family under a name of its own",
        )


def family_of(architecture: str) -> ModelFamily:
    """The family of an architecture (a `model_type`)."""
    return _FAMILIES.get(architecture, HUGGING_FACE)
