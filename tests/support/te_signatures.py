"""Reads the signatures of Transformer Engine's classes and functions that we call, without
importing it, from its wheels (`pip download --no-deps transformer-engine==2.20.2`):
`python -m tests.support.te_signatures WHEEL ... > tests/unit/trainer/te/signatures.json`.

Only names of parameters, their kinds and whether they have a default are kept; the project is under
the Apache License 2.0.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

_ROOT = "transformer_engine/"
_PLACES = {
    "Linear": ("pytorch/module/linear.py", "Linear", "__init__"),
    "Linear.forward": ("pytorch/module/linear.py", "Linear", "forward"),
    "RMSNorm": ("pytorch/module/rmsnorm.py", "RMSNorm", "__init__"),
    "RMSNorm, its base": ("pytorch/ops/basic/rmsnorm.py", "RMSNorm", "__init__"),
    "autocast": ("pytorch/quantization.py", "autocast", "__init__"),
    "is_bf16_available": ("pytorch/utils.py", None, "is_bf16_available"),
    "is_fp8_available": ("pytorch/quantization.py", None, "is_fp8_available"),
    "is_fp8_block_scaling_available": (
        "pytorch/quantization.py",
        None,
        "is_fp8_block_scaling_available",
    ),
}
"""What we call -> file, class, function."""

_RECIPES = "common/recipe/__init__.py"


def signature_of(source: str, owner: str | None, function: str) -> list[list[Any]]:
    """Parameters of a function in a module's text: [name, kind, whether it has a default].

    Args:
        source: the module.
        owner: the class that it is a method of, without `self` then; None for none.
        function: its name.
    """
    body = ast.parse(source).body
    if owner is not None:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
    found = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)
    arguments = found.args
    plain = [*arguments.posonlyargs, *arguments.args]
    first = len(plain) - len(arguments.defaults)
    made: list[list[Any]] = [
        [arg.arg, "POSITIONAL_OR_KEYWORD", place >= first] for place, arg in enumerate(plain)
    ]
    made += [
        [arg.arg, "KEYWORD_ONLY", default is not None]
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        made.append([arguments.kwarg.arg, "VAR_KEYWORD", True])
    return made[1:] if owner is not None else made


def classes_in(source: str) -> list[str]:
    """Names of the classes of a module's text."""
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def read_wheel(path: Path) -> dict[str, Any]:
    """What a wheel holds of what we call."""
    with zipfile.ZipFile(path) as wheel:

        def text(place: str) -> str:
            return wheel.read(_ROOT + place).decode()

        return {
            "signatures": {
                name: signature_of(text(place), owner, function)
                for name, (place, owner, function) in _PLACES.items()
            },
            "recipes": classes_in(text(_RECIPES)),
        }


def main() -> None:
    """Prints the signatures of all versions as JSON."""
    wheels = {path.name.split("-")[1]: path for path in map(Path, sys.argv[1:])}
    note = (
        "Signatures of NVIDIA's transformer-engine (Copyright (c) 2022-2026, NVIDIA CORPORATION & "
        "AFFILIATES; Apache License 2.0), read by tests/support/te_signatures.py; no code of it."
    )
    found = {version: read_wheel(wheels[version]) for version in sorted(wheels)}
    print(json.dumps({"note": note, "versions": found}, indent=1))


if __name__ == "__main__":
    main()
