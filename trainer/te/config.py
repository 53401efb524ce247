"""`TransformerEngine`: the converter that has NVIDIA's library compute a model's layers. Imports
without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.errors import ConfigError, check_types

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.config import TrainConfig
    from trainer.models.init import WeightSource

_FIELD = "train.converters"
_ARCHITECTURES = ("llama", "mistral")
_ALIGNED = 16
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class TransformerEngine:
    """Linear layers and norms of Llama and Mistral by Transformer Engine.

    Parameters keep their names, shapes and places, so a checkpoint goes with or without it.
    Embedding, head and attention stay as they are: docs/decisions/066. Needs the extra `te` on the
    workers, and precision `bfloat16`.
    """

    float8: Literal["current", "block"] | None = None
    """How linear layers multiply in 8 bits: `current`, one scale for a tensor; `block`, one for
    each 128 numbers or 128 x 128 of a weight. None: in bfloat16."""

    devices = ("cuda",)  # kinds that the library has kernels for

    def __post_init__(self) -> None:
        asked: str | None = self.float8
        if asked == "delayed":
            raise ConfigError(
                "TransformerEngine.float8",
                self.float8,
                "its scales come from the amax of earlier steps, which depends on the lanes that a "
                "replica was dealt: the bits would change with each fault",
                "Use 'current' or 'block', whose scales come from the tensor itself",
            )
        check_types(self, "TransformerEngine")

    def convert(self, model: nn.Module, source: WeightSource) -> tuple[nn.Module, WeightSource]:
        """See ModelConverter."""
        from torch import nn

        from trainer.te.layers import TeLinear, TeRMSNorm

        self._check_architecture(getattr(model, "config", None))
        for name, module in list(model.named_modules()):
            owner, _, leaf = name.rpartition(".")
            made: nn.Module
            if leaf in _LINEAR:
                self._check_plain(name, module)
                linear = TeLinear.of(cast(nn.Linear, module))
                linear.recipe = self.float8
                made = linear
            elif type(module).__name__.endswith("RMSNorm"):
                norm: Any = module
                made = TeRMSNorm(norm.weight, norm.variance_epsilon)
            else:
                continue
            setattr(model.get_submodule(owner), leaf, made)
        return model, source

    def _check_architecture(self, config: Any) -> None:
        found = getattr(config, "model_type", "a custom model")
        if found not in _ARCHITECTURES:
            fact = f"{found} is none of {', '.join(_ARCHITECTURES)}, whose layers it knows"
            raise ConfigError(_FIELD, self, fact, "Leave it out, or change the model's settings")

    def _check_plain(self, name: str, module: nn.Module) -> None:
        """Raises ConfigError where a layer is no `nn.Linear` as it was: what another converter has
        it compute would be lost."""
        from torch import nn

        if type(module) is not nn.Linear:
            kind = type(module).__name__
            raise ConfigError(
                _FIELD,
                self,
                f"{name} is a {kind}, of a converter before, and it replaces nn.Linear alone",
                "Leave one of the two converters out",
            )

    def check(self, model: nn.Module, train: TrainConfig, device: torch.device | None) -> None:
        """See CheckedConverter."""
        self._check_settings(train)
        if self.float8 is not None:
            self._check_sides(model, train.parallel.tensor)
        if device is not None:
            self._check_worker(device)

    def _check_settings(self, train: TrainConfig) -> None:
        if train.precision != "bfloat16":
            raise ConfigError(
                "train.precision",
                train.precision,
                "Transformer Engine's layers are for bfloat16 here",
                "Use 'bfloat16', or leave the converter out",
            )
        if train.compile != "off":
            raise ConfigError(
                "train.compile",
                train.compile,
                "Transformer Engine's layers cannot be compiled",
                "Use 'off', or Float8 in place of TransformerEngine",
            )

    def _check_sides(self, model: nn.Module, tensor: int) -> None:
        from trainer.te.layers import TeLinear

        for name, layer in model.named_modules():
            if not isinstance(layer, TeLinear):
                continue
            sides = layer.out_features, layer.in_features
            if any(side % (_ALIGNED * tensor) for side in sides):
                raise ConfigError(
                    _FIELD,
                    self,
                    f"{name} is {sides[0]} x {sides[1]}, and over {tensor} tensor ranks the sides "
                    f"of each part must be multiples of {_ALIGNED}",
                    "Use float8=None, or another tensor degree",
                )

    def _check_worker(self, device: torch.device) -> None:
        from torch._guards import detect_fake_mode

        from trainer.te.library import OLDEST, TOO_NEW, why_not

        if detect_fake_mode() is not None:  # a dry run: another machine's GPU
            return
        fact: str | None = f"Transformer Engine has no kernels for device {device.type!r}"
        if device.type in self.devices:
            fact = why_not(self.float8)
        if fact is not None:
            wanted = f">={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}"
            raise ConfigError(
                _FIELD,
                self,
                fact,
                f"Use `pip install -c constraints.txt -e '.[te]'` (transformer-engine[pytorch]"
                f"{wanted}) on machines whose GPUs can, or leave the converter out",
            )
