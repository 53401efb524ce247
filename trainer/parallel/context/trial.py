"""Whether a model's attention can be a ring's: tried on the driver, before anything starts.

A small model of the same configuration, with random weights, is given two texts as one sample, kept
apart by the ring and by their positions. It must say of each what it says of it alone, by
transformers' own attention. One that looks elsewhere than where the ring lets it, or that takes no
notice of positions, does not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError
from trainer.models.causal import smaller
from trainer.models.family import ModelFamily, family_of
from trainer.models.hf import one_text_each, text_configuration

log = logging.getLogger(__name__)

_TOKENS = 4
_MOST = 1e-4
"""Difference of logits, as a share of the largest. Rounding makes less than 1e-6."""

_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def check_ring(config: Mapping[str, Any], context: int) -> None:
    """Checks that a ring computes what the model's own attention would.

    Args:
        config: the complete configuration.
        context: the degree.

    Raises:
        ConfigError: it would not, or that cannot be tried.
    """
    fact = _refusal(config, context)
    if fact is None:
        family = family_of(config["model_type"])
        fact = "it could not be tried, as no small model of it can be made"
        for candidate in smaller(config):
            try:
                difference = _difference(family, candidate)
            except ConfigError as error:
                fact = error.fact
                break
            except Exception as error:  # not every configuration can be made smaller
                log.debug("%s cannot be made smaller: %s", config["model_type"], error)
                continue
            if difference <= _MOST:
                return
            fact = "its tokens see others than those of their own text, or ignore positions"
            break
    raise ConfigError(
        "train.task.model.architecture",
        config["model_type"],
        f"it does not go with context parallelism and texts apart: {fact}",
        "Use train.parallel.context = 1 and texts='joined', or an architecture like 'llama'",
    )


def _refusal(config: Mapping[str, Any], context: int) -> str | None:
    """What the trial would not show."""
    text = text_configuration(config)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    dropped = [name for name in _DROPOUT if getattr(text, name, None)]
    if dropped:
        return f"it has {dropped[0]} = {getattr(text, dropped[0])}"
    if "longrope" in _rotations(text):
        return (
            "its rotation (longrope) goes by the largest position that a worker has, or that any "
            "text of a micro-batch has"
        )
    if context > 1 and config.get("output_router_logits") and config.get("router_aux_loss_coef"):
        return "the auxiliary loss of its router is of all tokens of a sample together"
    return None


def _rotations(text: Any) -> set[str]:
    """Types of the rotations by position, of all layers or of kinds of them."""
    given = getattr(text, "rope_parameters", None) or {}
    each = (given, *(entry for entry in given.values() if isinstance(entry, Mapping)))
    return {entry["rope_type"] for entry in each if "rope_type" in entry}


def _difference(family: ModelFamily, config: Mapping[str, Any]) -> float:
    """Between two texts in one sample, apart, and each alone."""
    import torch
    from torch.func import functional_call

    from trainer.parallel.context.attention import put_ring_in
    from trainer.parallel.context.ring import Ring

    with torch.random.fork_rng(devices=[]), torch.no_grad(), one_text_each():
        torch.manual_seed(0)
        model = family.build_on_meta(config).eval()
        weights = {n: torch.randn(p.shape) * 0.2 for n, p in model.named_parameters()}
        ids = torch.arange(2, 2 + 2 * _TOKENS)[None]

        def say(tokens: torch.Tensor, **more: Any) -> torch.Tensor:
            inputs = {"input_ids": tokens, "use_cache": False, **more}
            return functional_call(model, weights, (), inputs).logits

        alone = torch.cat([say(part) for part in ids.split(_TOKENS, dim=1)], dim=1)
        ring = Ring()
        ring.documents = [[0, _TOKENS]]
        put_ring_in(model, ring)
        apart = say(ids, position_ids=torch.arange(_TOKENS).repeat(1, 2))
    return float((apart - alone).abs().max() / alone.abs().max())
