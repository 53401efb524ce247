"""The library itself: whether it is here, of a version that is known, and able on this GPU.

Imported on workers alone: a driver may have no GPU, and so no Transformer Engine.
"""

from __future__ import annotations

import contextlib
import re
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

OLDEST, TOO_NEW = (2, 18), (2, 21)
"""Versions whose signatures are known (tests/unit/trainer/te/signatures.json)."""

Recipe = Literal["current", "block"]
"""See `TransformerEngine.float8`."""

_RECIPES = {"current": "Float8CurrentScaling", "block": "Float8BlockScaling"}


def load() -> ModuleType:
    """`transformer_engine.pytorch`.

    Raises:
        Exception: it is not here, or cannot be loaded; of which class is the library's choice.
    """
    return import_module("transformer_engine.pytorch")


def why_not(recipe: Recipe | None) -> str | None:
    """What keeps this process from using the library, None where nothing does."""
    try:
        version = str(import_module("transformer_engine").__version__)
        te: Any = load()
    except Exception as error:  # it raises what it likes, such as RuntimeError where half is here
        return f"Transformer Engine cannot be imported: {error}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < TOO_NEW:
        return (
            f"Transformer Engine is {version}, and {OLDEST[0]}.{OLDEST[1]} or more is needed, "
            f"below {TOO_NEW[0]}.{TOO_NEW[1]}"
        )
    asked = {
        None: te.is_bf16_available,
        "current": te.is_fp8_available,
        "block": te.is_fp8_block_scaling_available,
    }
    able, reason = asked[recipe](return_reason=True)
    return None if able else f"Transformer Engine cannot on this GPU: {reason}"


def in_8_bits(recipe: Recipe | None) -> AbstractContextManager[Any]:
    """In this block the library's layers multiply as `recipe` says; None: in bfloat16."""
    if recipe is None:
        return contextlib.nullcontext()
    made = getattr(import_module("transformer_engine.common.recipe"), _RECIPES[recipe])()
    return load().autocast(enabled=True, recipe=made)


def lend(module: Any, weight: Any) -> Any:
    """The library's module with our weight in the place of its own: it stays there until the next
    call, as the norm reads it in backward once more."""
    module._parameters["weight"] = weight
    return module
