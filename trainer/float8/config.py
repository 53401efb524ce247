"""`Float8`: the converter that has a model's linear layers multiply in 8 bits. Imports without
torch."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainer.capability import FLOAT8, check_capability
from trainer.errors import ConfigError, check_types

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.config import TrainConfig
    from trainer.models.init import WeightSource

_FIELD = "train.converters"
_ALIGNED = 16


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Linear layers, of the whole model, whose three matrix products are 8-bit, with current
    scaling.

    Parameters, gradients, optimizer and checkpoints are as without it. The head of a transformers
    model, layers that share their weight with another, and layers of which a side is no multiple of
    16, stay as they are. A custom model's head is known by `get_output_embeddings()` alone: where
    there is none, name the head in `keep`.
    """

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """`tensorwise`: one scale for a tensor, the fastest. `rowwise`: one for each row, more exact;
    only with precision `bfloat16`."""
    gather: bool = False
    """Whether FSDP2 gathers weights in 8 bits, with recipe `tensorwise`: half the bytes of
    bfloat16, and the same bits of the run."""
    keep: tuple[str, ...] = ()
    """Names or patterns (`*.q_proj`) of layers that stay as they are, such as the head of a custom
    model without `get_output_embeddings()`."""

    def __post_init__(self) -> None:
        asked: str = self.recipe
        if asked == "delayed":
            raise ConfigError(
                "Float8.recipe",
                self.recipe,
                "its scales come from the amax of earlier steps, which depends on the lanes that a "
                "replica was dealt: the bits would change with each fault",
                "Use 'tensorwise' or 'rowwise', whose scales come from the tensor itself",
            )
        check_types(self, "Float8")
        if self.gather and self.recipe != "tensorwise":
            raise ConfigError(
                "Float8.gather",
                True,
                "a weight is scaled by rows for its output and by columns for the gradient of its "
                "input, and 8 bits hold one of them",
                "Use recipe='tensorwise', or gather=False",
            )

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        """See ModelConverter."""
        from torch import nn

        from trainer.float8.linear import Float8Linear
        from trainer.float8.shard import Float8Shard

        made: dict[nn.Linear, Float8Linear] = {}
        for name, plain in self._layers(model):
            if plain not in made:
                layer = made[plain] = Float8Linear.of(plain)
                layer.recipe = self.recipe
                if self.gather:
                    trained = layer.weight.requires_grad
                    layer.weight = nn.Parameter(Float8Shard(layer.weight.detach()), trained)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made[plain])
        return model, source

    def _layers(self, model: Any) -> list[tuple[str, nn.Linear]]:
        """The layers that are converted, each by all names that it has."""
        from torch import nn

        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        named = [
            (name, module)
            for name, module in model.named_modules(remove_duplicate=False)
            if name and isinstance(module, nn.Linear)
        ]
        stay = {head} | {
            module
            for name, module in named
            if any(fnmatch.fnmatch(name, pattern) for pattern in self.keep)
        }
        owners = Counter(
            param for module in model.modules() for param in module.parameters(recurse=False)
        )
        layers = [
            (name, module)
            for name, module in named
            if type(module) is nn.Linear
            and module not in stay
            and owners[module.weight] == 1  # else it is another's, too, which does not multiply so
            and not (module.in_features % _ALIGNED or module.out_features % _ALIGNED)
        ]
        if not layers:
            others = (
                f": {name} is a {type(module).__name__} already"
                for name, module in named
                if type(module) is not nn.Linear
            )
            raise ConfigError(
                _FIELD,
                self,
                "the model has no linear layer beside the head whose sides 16 divides and whose "
                "weight is its alone" + next(others, ""),
                "Leave it out, or name fewer layers in keep",
            )
        self._check_keep([name for name, _ in named])
        return layers

    def _check_keep(self, names: list[str]) -> None:
        """Raises ConfigError for a pattern that keeps none of the linear layers, by their names."""
        for pattern in self.keep:
            if not fnmatch.filter(names, pattern):
                (nearest,) = difflib.get_close_matches(pattern, names, n=1, cutoff=0)
                raise ConfigError(
                    "Float8.keep",
                    pattern,
                    "no linear layer's name is this, or fits it as a pattern",
                    f"Use names such as {nearest!r}, or patterns of them",
                )

    def check(self, model: nn.Module, train: TrainConfig, device: torch.device | None) -> None:
        """See CheckedConverter."""
        from trainer.float8.linear import Float8Linear

        if self.recipe == "rowwise" and train.precision != "bfloat16":
            raise ConfigError(
                _FIELD,
                self,
                f"products with a scale for each row come in bfloat16, and precision is "
                f"{train.precision!r}",
                "Use precision='bfloat16', or recipe='tensorwise'",
            )
        dims = train.parallel.dims
        if self.gather and dims.regathers_partly:
            raise ConfigError(
                "train.parallel.reshard_after_forward",
                train.parallel.reshard_after_forward,
                f"FSDP2 cannot leave weights that are gathered in 8 bits over {dims.regathered} of "
                f"{dims.fsdp} workers",
                "Use True or False, or Float8(gather=False)",
            )
        for name, layer in model.named_modules():
            if isinstance(layer, Float8Linear):
                self._check_parts(name, layer, train)
        if device is not None:
            check_capability(
                device,
                FLOAT8,
                field=_FIELD,
                value=self,
                what="an 8-bit product",
                fix="Leave it out on these machines",
            )

    def _check_parts(self, name: str, layer: nn.Linear, train: TrainConfig) -> None:
        """Raises ConfigError where the workers' parts of a layer are no matrices for 8 bits."""
        dims, sides = train.parallel.dims, (layer.in_features, layer.out_features)
        if any(side % (_ALIGNED * dims.tensor) for side in sides):
            raise ConfigError(
                _FIELD,
                self,
                f"{name} is {sides[1]} x {sides[0]}, and over {dims.tensor} tensor ranks the sides "
                f"of each part must be multiples of {_ALIGNED}",
                f"Use keep=({name!r},), or another tensor degree",
            )
        if self.gather and layer.out_features % (dims.tensor * dims.fsdp):
            raise ConfigError(
                _FIELD,
                self,
                f"{name} has {layer.out_features} rows, which {dims.tensor} tensor ranks x "
                f"{dims.fsdp} shards do not divide: FSDP2 pads no shard that is gathered in 8 bits",
                f"Use keep=({name!r},), gather=False, or another shard degree",
            )
