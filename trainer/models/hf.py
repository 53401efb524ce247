"""Any Hugging Face causal language model, by configuration or by path."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, check_types

if TYPE_CHECKING:
    from torch import nn

    from trainer.models.init import WeightSource

_NUMBERS = (
    "Set train.precision for what blocks compute in, and master_dtype of train.optimizer for what "
    "weights are kept in"
)
_OURS = {
    "attn_implementation": "Leave it out: attention is torch's scaled_dot_product_attention",
    "dtype": _NUMBERS,
    "torch_dtype": _NUMBERS,
}
"""Settings of transformers that the trainer makes itself, and what to do instead. A model's
config.json may have them."""
_WITHOUT_EFFECT = re.compile(
    r"_.*|.*drop.*|.*_token_ids?|.*_loss_coef|router_jitter_noise|init.*|output_.*|summary_.*|"
    r"return_dict|use_cache|(torch_)?dtype|.*attn_implementation|transformers_version|architectures|"
    r"auto_map|name_or_path|id2label|label2id|num_labels|problem_type|"
    r"chunk_size_feed_forward|pretraining_tp"
)
"""Settings that change nothing of what a model computes of its weights and tokens, but for noise
and further losses in training."""

_FLOAT = "__float__"
"""transformers' tag of a number that JSON has not: {"__float__": "Infinity"}."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Hugging Face causal language model: an architecture with settings, or a local directory."""

    architecture: str = "llama"
    """The `model_type` of a transformers configuration; not used with `path`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of that configuration (`hidden_size`, `num_hidden_layers`, …); with `path`,
    overrides. `router_aux_loss_coef` turns `output_router_logits` on, unless that is set, too."""
    path: str | None = None
    """A directory with `config.json`, and weights where `pretrained` is set."""
    pretrained: bool = False
    """Start from the safetensors weights in `path`, instead of from seeded ones."""

    def __post_init__(self) -> None:
        check_types(self, "train.task.model")

    def resolve(self, vocab_size: int, end_id: int | None = None) -> dict[str, Any]:
        """The complete transformers configuration as a plain dict, checked.

        Args:
            vocab_size: tokens that the data uses. A configuration that sets none gets this number,
                rounded up to a multiple of 64.
            end_id: of a tokenizer that has no special token but that of the end of a text; None:
                it is the architecture's own, whose special ids its configuration has.

        Raises:
            ConfigError: unknown architecture, missing directory, a quantized model, or a vocabulary
                larger than the model's.
        """
        from transformers import AutoConfig

        settings = {"use_cache": False, **self.settings}
        if "router_aux_loss_coef" in settings:  # it would do nothing otherwise
            settings = {"output_router_logits": True, **settings}
        if self.path is not None:
            settings = {**self._read_config(self.directory()), **settings}
        if settings.pop("quantization_config", None) is not None:
            raise self._quantized()
        architecture = settings.pop("model_type", self.architecture)
        if settings.get("vocab_size") is None:
            settings["vocab_size"] = -(-vocab_size // 64) * 64
        try:
            config = AutoConfig.for_model(architecture, **_untagged(settings))
        except Exception as error:  # transformers raises errors of many kinds here
            raise ConfigError(
                "train.task.model.architecture",
                architecture,
                f"transformers refuses the configuration: {_brief(error)}",
                "Use the model_type of a transformers configuration, such as 'llama', and settings "
                "that it has",
            ) from error
        if vocab_size > settings["vocab_size"]:
            raise ConfigError(
                "train.task.model.settings",
                f"vocab_size = {settings['vocab_size']}",
                f"the tokenizer has {vocab_size} tokens, more than the model",
                f"Set vocab_size to {vocab_size} or more, or use a tokenizer with fewer tokens",
            )
        if end_id is not None:
            self._set_special(config.get_text_config(), end_id)
        return dict(config.to_dict())

    def _quantized(self) -> ConfigError:
        own = "quantization_config" in self.settings
        return ConfigError(
            "train.task.model.settings" if own else "train.task.model.path",
            "quantization_config" if own else self.path,
            "the model is quantized: its weights are codes, and only numbers can be trained",
            "Give the model in bfloat16 or float32, or set quantization_config=None in "
            "train.task.model.settings where its weights are numbers or are not read",
        )

    def _set_special(self, config: Any, end_id: int) -> None:
        """Of a tokenizer without padding: the embedding of a token for it would never learn. An
        encoder keeps it all the same, as RoBERTa counts positions from there."""
        special: dict[str, int | None] = {"bos_token_id": end_id, "eos_token_id": end_id}
        if not hasattr(config, "is_decoder"):
            special["pad_token_id"] = None
        for name, value in special.items():
            if name not in self.settings:
                setattr(config, name, value)

    def check_settings(self, resolved: Mapping[str, Any]) -> None:
        """Raises ConfigError for a setting that transformers would take and nothing reads.

        Args:
            resolved: what `resolve` made of the settings.
        """
        config = _configuration(resolved)
        kind = type(config)
        known = {*inspect.signature(kind).parameters, *kind.attribute_map}
        for key in self.settings:
            if key in _OURS:
                raise ConfigError(
                    "train.task.model.settings", key, "nothing would read it", _OURS[key]
                )
            # What goes by an older name is converted, and is no attribute then.
            if key in known or hasattr(kind, key) or not hasattr(config, key):
                continue
            nearest = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                "train.task.model.settings",
                key,
                f"{kind.model_type} has no setting of this name",
                f"Use {nearest[0]!r}" if nearest else f"Use one of transformers' {kind.__name__}",
            )

    def directory(self) -> Path:
        """Where the model lies: `path`.

        Raises:
            ConfigError: there is no such directory.
        """
        directory = Path(self.path or "")
        if not directory.is_dir():
            raise ConfigError(
                "train.task.model.path",
                self.path,
                "there is no such directory on this machine, and nothing is downloaded",
                "Give a model directory: `hf download NAME --local-dir DIR` makes one of a model "
                "on the Hugging Face Hub",
            )
        return directory

    @staticmethod
    def _read_config(directory: Path) -> dict[str, Any]:
        file = directory / "config.json"
        if not file.is_file():
            raise ConfigError(
                "train.task.model.path",
                str(directory),
                "it has no config.json",
                "Give a model directory",
            )
        try:
            config = json.loads(file.read_text())
        except ValueError as error:
            raise ConfigError(
                "train.task.model.path", str(file), f"not JSON: {error}", "Save the model again"
            ) from error
        if not isinstance(config, dict) or "model_type" not in config:
            raise ConfigError(
                "train.task.model.path", str(file), "it names no model_type", "Save the model again"
            )
        return config


def check_positions(config: Mapping[str, Any], seq_len: int) -> None:
    """Raises ConfigError where a sample of `seq_len` tokens has more than the model of `config` has
    positions."""
    text = text_configuration(config)
    for name in ("max_position_embeddings", "max_seq_len"):
        positions = getattr(text, name, None)
        if isinstance(positions, int) and 0 < positions < seq_len:
            raise ConfigError(
                "train.task.seq_len",
                seq_len,
                f"the model has {positions} positions",
                f"Use {positions} or fewer, or set {name} in train.task.model.settings",
            )


def find_differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings by which two complete configurations are different functions of the same
    weights, with both values. One that only one of them has says nothing: versions of transformers
    differ in what they write."""
    found = dict[str, tuple[Any, Any]]()
    for key in sorted(before.keys() & now.keys()):
        was, value = before[key], now[key]
        if _WITHOUT_EFFECT.fullmatch(key) or was == value:
            continue
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            inner = find_differing(was, value)
            found.update({f"{key}.{name}": both for name, both in inner.items()})
        else:
            found[key] = was, value
    return found


def text_configuration(config: Mapping[str, Any]) -> Any:
    """transformers' object of the language model in a complete configuration. Its attributes have
    one name in all architectures, such as `num_hidden_layers`."""
    return _configuration(config).get_text_config()


def head_size(text: Any) -> int | None:
    """Size of an attention head in a `text_configuration`; None where it does not say. Many
    architectures have no `head_dim`, or None: then heads divide the hidden size."""
    given, heads = getattr(text, "head_dim", None), getattr(text, "num_attention_heads", None)
    return given or (text.hidden_size // heads if heads else None)


def build_on_meta(config: Mapping[str, Any]) -> nn.Module:
    """The model with its parameters on the meta device and its buffers on the CPU.

    Raises:
        ConfigError: the architecture has no causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from trainer.models.init import parameters_on_meta

    built = _configuration(config)
    try:
        with parameters_on_meta():
            model: nn.Module = AutoModelForCausalLM.from_config(
                built,
                attn_implementation="sdpa",
                dtype=torch.float32,
                trust_remote_code=False,  # else transformers may ask whoever sits there
            )
    except Exception as error:  # transformers raises errors of many kinds here
        raise ConfigError(
            "train.task.model.architecture",
            config["model_type"],
            f"transformers cannot build a causal language model of it: {_brief(error)}",
            "Use a decoder architecture, such as 'llama' or 'qwen2', with settings that fit it",
        ) from error
    return model


@contextmanager
def one_text_each() -> Iterator[None]:
    """In this block a forward of a transformers model takes each sample for one text, where it
    would ask the device whether it is several, and wait for the answer."""
    from transformers import masking_utils

    asked = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asked


def keep_rotations(model: nn.Module) -> None:
    """Has rotations of the type `dynamic` keep their frequencies. They would ask the device in each
    forward whether a sample is longer than the model's positions, and wait; `check_positions` sees
    to it that none is. To be called when the weights are known, as transformers sets the
    frequencies by their type, too."""
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "dynamic":
            module.rope_type = "default"
        elif isinstance(kind, dict):  # of each type of layer
            module.rope_type = {
                layer: "default" if own == "dynamic" else own for layer, own in kind.items()
            }


def _configuration(config: Mapping[str, Any]) -> Any:
    """transformers' object of a complete configuration."""
    from transformers import AutoConfig

    settings = _untagged(config)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as a checkpoint has it, in JSON. That has no infinity: one is tagged, as
    transformers does in a config.json."""
    written = json.dumps(config, default=str)
    return dict(json.loads(written, parse_constant=lambda name: {_FLOAT: name}))


def _untagged(value: Any) -> Any:
    """A configuration, or a part of one, with the numbers that JSON has not."""
    if isinstance(value, Mapping):
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        return {key: _untagged(part) for key, part in value.items()}
    return [_untagged(part) for part in value] if isinstance(value, list) else value


def _brief(error: Exception) -> str:
    """The beginning of an error's text on one line, with its type where the text is a single
    word."""
    text = str(error) if " " in str(error) else repr(error)
    return textwrap.shorten(text, 150, placeholder=" …").rstrip(".")


def weights(
    config: Mapping[str, Any], model: Any, seed: int, pretrained_path: str | None
) -> WeightSource:
    """Where the initial weights come from: the files in `pretrained_path`, or the seed. Buffers
    that are in the files get their values at once: no checkpoint holds them."""
    if pretrained_path is not None:
        from trainer.models.init import saved_buffers
        from trainer.models.pretrained import PretrainedWeights

        source = PretrainedWeights(pretrained_path, model)
        source.check({name: tuple(param.shape) for name, param in model.named_parameters()})
        source.fill(saved_buffers(model))
        return source
    from trainer.models.init import SeededWeights, record_recipes

    return SeededWeights(record_recipes(model, model._init_weights), seed)
