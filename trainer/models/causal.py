"""Whether a model is causal: tried on the driver, before anything starts.

An encoder such as BERT can be built as a causal language model, and would learn from the very
tokens that it is to predict. No field of a configuration says reliably what it is, so a small model
of it, with random weights, is asked on the CPU: a later token must not change what is said of an
earlier one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from trainer.errors import ConfigError, blame
from trainer.models.computes import check_computes
from trainer.models.family import family_of

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

TOKENS = 8
"""Of a sample that a small model is tried with, at most."""
_MOST_PARAMETERS = 50_000_000
_LEAK = 1e-3
"""What a token may change of earlier logits, as a share of what it changes of its own. Rounding
makes less than 1e-6, in layers that group tokens; looking ahead makes 0.2 and more."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_SHARED_HEADS = ("num_key_value_heads", "num_kv_heads")
_VOCABULARY = 64
_SMALL = {
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_SHARED_HEADS, 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), 2),
}
"""What a small model has at most, by the names that configurations use."""


def check_causal(config: Mapping[str, Any], seq_len: int) -> None:
    """Checks that no token of a sample has a part in what the model says of those before it.

    Args:
        config: the complete configuration.
        seq_len: tokens in a sample.

    Raises:
        ConfigError: one has, or the model cannot compute.
    """
    if seq_len == 1:
        return
    tokens = min(seq_len, TOKENS)
    leak, error = try_small(config, partial(_leak, tokens=tokens))
    if leak is not None:
        if leak > _LEAK:
            raise _not_causal(config)
        return
    if error is not None:
        check_computes(family_of(config["model_type"]), config, tokens)
    log.warning(
        "%s could not be tried: whether a later token has a part in the prediction of an earlier "
        "one is not known. A small one %s",
        config["model_type"],
        "has too many parameters" if error is None else f"raised {blame(error)}",
    )


def try_small(
    config: Mapping[str, Any], attempt: Callable[[Any], Answer | None]
) -> tuple[Answer | None, Exception | None]:
    """Tries small models of a configuration, one after the other, until one gives an answer.

    Args:
        config: the complete configuration.
        attempt: called with a model in evaluation, parameters on the meta device; None: it says
            nothing of that one.

    Returns:
        The answer; and, where none gave one, what the last of those has raised that have.
    """
    family = family_of(config["model_type"])
    error: Exception | None = None
    for candidate in smaller(config):
        try:
            model = family.build_on_meta(candidate).eval()
            if sum(param.numel() for param in model.parameters()) > _MOST_PARAMETERS:
                continue
            answer = attempt(model)
        except Exception as raised:  # not every configuration can be made smaller
            log.debug("%s cannot be made smaller: %s", config["model_type"], raised)
            error = raised
            continue
        if answer is not None:
            return answer, None
    return None, error


def _leak(model: Any, tokens: int) -> float | None:
    """What another last token changes of the earlier logits, as a share of what it changes of its
    own; None where the model says nothing finite."""
    import torch
    from torch.func import functional_call

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        weights = {n: torch.randn(p.shape) * 0.2 for n, p in model.named_parameters()}
        ids = torch.arange(2, 2 + tokens).repeat(2, 1)
        ids[1, -1] += 1
        # One after the other: each is computed in the same way, whatever the other holds.
        said = [
            functional_call(model, weights, (), {"input_ids": row[None], "use_cache": False}).logits
            for row in ids
        ]
        change = (said[0] - said[1]).abs().amax(dim=(0, 2))
    leak = float(change[:-1].max() / change[-1])
    return None if math.isnan(leak) else leak


def smaller(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same model with everything small, and for where that does not build, with two layers."""
    small = dict(config)
    for name, most in _SMALL.items():
        if isinstance(config.get(name), int):
            small[name] = min(config[name], most)
    small.update(_shared_heads(config, small))
    yield _cut(config, {**small, **_vocabulary(config)})
    two = {name: small[name] for name in _LAYERS if name in small}
    yield _cut(config, {**config, **two, **_vocabulary(config)})


def _shared_heads(config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of shared heads that do not divide the heads, as those of `config` do not."""
    heads = next((name for name in _HEADS if isinstance(config.get(name), int)), None)
    if heads is None:
        return {}
    shared = [n for n in _SHARED_HEADS if isinstance(config.get(n), int) and config[n]]
    return {name: small[heads] + 1 for name in shared if config[heads] % config[name]}


def _vocabulary(config: Mapping[str, Any]) -> dict[str, int]:
    """A small vocabulary, and a token of it for each special one that it does not have. The one of
    the configuration may not be known yet."""
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    beyond = [n for n, value in ids.items() if isinstance(value, int) and value >= _VOCABULARY]
    return {"vocab_size": _VOCABULARY, **dict.fromkeys(beyond, 0)}


def _cut(config: Mapping[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Keeps the first and the last entry of lists that have one for each layer."""
    layers = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), 0)
    if layers > 2:
        for name, value in config.items():
            if isinstance(value, list | tuple) and len(value) == layers:
                small[name] = [value[0], value[-1]]
    return small


def _not_causal(config: Mapping[str, Any]) -> ConfigError:
    decoder = ", or is_decoder=True in its settings" * (config.get("is_decoder") is False)
    return ConfigError(
        "train.task.model.architecture",
        config["model_type"],
        "it is not causal: a later token changes what is said of an earlier one, so it would learn "
        "from the tokens that it is to predict",
        f"Use a decoder architecture, such as 'llama' or 'qwen2'{decoder}",
    )
