"""Whether the fields of a configuration have the types that it declares. Pure; without torch."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    type(None): "None",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A field whose value has another type than the field."""

    field: str
    """The field's name."""
    value: object
    """What it holds."""
    fact: str
    """Why that cannot work."""
    fix: str
    """What to write instead."""


def settle_types(config: Any) -> Mismatch | None:
    """Checks the fields of the dataclass `config`, a frozen one too, against its annotations.

    Numbers of numpy (`len` and `//` of arrays yield them), paths and lists are turned into the
    Python number, text or tuple that the field declares: records are JSON, which knows no others.

    Returns:
        The first field that does not fit; None where all do.
    """
    for name, kind in _kinds(config.__class__).items():
        value = getattr(config, name)
        if fits(value, kind):
            continue
        plain = _plain(value)
        if not fits(plain, kind):
            wanted = describe(kind)
            return Mismatch(
                field=name,
                value=value,
                fact=f"of type {type_name(value)}, not {wanted}",
                fix=f"Use {wanted}",
            )
        object.__setattr__(config, name, plain)
    return None


def fits(value: object, kind: Any) -> bool:
    """Whether `value` is of the annotated type `kind`. What cannot be checked at run time fits."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and _items_fit(value, arguments)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits(key, arguments[0]) for key in value)
    if kind in (int, float) and isinstance(value, bool):
        return False  # Python's bool is an int
    if kind is float:
        return isinstance(value, int | float)
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """The annotated type `kind` in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a tuple, every item {describe(arguments[0])}"
        return f"a tuple of ({', '.join(map(describe, arguments))})"
    if origin is Mapping:
        return "a mapping with texts as keys"
    return _NAMES.get(kind) or f"a {kind.__name__}"


def _items_fit(value: tuple[object, ...], kinds: tuple[Any, ...]) -> bool:
    if kinds[-1] is Ellipsis:
        return all(fits(item, kinds[0]) for item in value)
    return len(value) == len(kinds) and all(map(fits, value, kinds))


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def type_name(value: object) -> str:
    """The type of `value` as an error shows it: with its module, where that is not Python's own."""
    kind = type(value)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{home}{kind.__qualname__}"


@functools.cache
def _kinds(config: type) -> dict[str, Any]:
    """The types of the fields of `config`."""
    names = vars(sys.modules[config.__module__])
    return {field.name: _resolve(field.type, names) for field in dataclasses.fields(config)}


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"field": annotation})
    try:
        return typing.get_type_hints(holder, globalns=names)["field"]
    except NameError:
        return Any  # a name that is imported for type checkers only, such as torch's
