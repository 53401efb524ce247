"""A field of a wrong type is found where a configuration is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from checkpointing import CheckpointConfig, CheckpointConfigError, S3Config
from checkpointing.field_types import settle_types

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int = 1
    rate: float = 1.0
    name: str = ""
    flag: bool = False
    limit: int | None = None
    mode: Literal["a", "b"] = "a"
    every: int | Literal["auto"] | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    anything: Any = None
    for_checkers: Unknown = None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", "100"),
        ("count", 10.5),
        ("count", True),
        ("count", None),
        ("rate", "3e-4"),
        ("rate", False),
        ("name", 3),
        ("name", b"text"),
        ("flag", 1),
        ("limit", "none"),
        ("limit", 2.0),
        ("mode", "c"),
        ("mode", 1),
        ("every", "often"),
        ("pair", (0.0,)),
        ("pair", (0.0, "1")),
        ("pair", 0.5),
        ("names", ("a", 1)),
        ("settings", [1]),
        ("settings", {1: 1}),
        ("inner", {}),
        ("inner", Inner),
    ],
)
def test_a_wrong_type_is_found(name: str, value: object) -> None:
    changed: Any = {name: value}
    wrong = settle_types(Outer(**changed))
    assert wrong is not None
    assert (wrong.field, wrong.value) == (name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 10**6),
        ("rate", 1),
        ("rate", float("inf")),
        ("limit", 3),
        ("mode", "b"),
        ("every", "auto"),
        ("every", 7),
        ("pair", (0, 1)),
        ("names", ("a", "b")),
        ("settings", {"a": object()}),
        ("inner", Inner(size=2)),
        ("anything", object),
        ("for_checkers", 3),
    ],
)
def test_a_right_type_stays_as_it_is(name: str, value: object) -> None:
    changed: Any = {name: value}
    config = Outer(**changed)
    assert settle_types(config) is None
    assert getattr(config, name) is value


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("count", np.int64(3), 3),
        ("limit", np.int32(3), 3),
        ("rate", np.float32(0.5), 0.5),
        ("pair", [0.5, np.int64(1)], (0.5, 1)),
        ("names", [Path("a"), "b"], ("a", "b")),
        ("name", Path("a/b"), "a/b"),
    ],
)
def test_what_means_the_same_becomes_what_json_knows(
    name: str, value: object, plain: object
) -> None:
    changed: Any = {name: value}
    config = Outer(**changed)
    assert settle_types(config) is None
    assert getattr(config, name) == plain
    assert type(getattr(config, name)) is type(plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"every_steps": 1.5},
            "checkpoint.every_steps = 1.5: of type float, not a whole number or 'auto' or None. "
            "Use a whole number or 'auto' or None.",
        ),
        (
            {"store": 3},
            "checkpoint.store = 3: of type int, not a text or a S3Config or a "
            "StorePlace or None. "
            "Use a text or a S3Config or a StorePlace or None.",
        ),
    ],
)
def test_a_checkpoint_setting_of_a_wrong_type(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointConfigError) as caught:
        CheckpointConfig(**settings)
    assert str(caught.value) == message


def test_a_url_of_a_wrong_type_is_not_shown() -> None:
    url: Any = b"s3://user:secret@bucket"
    with pytest.raises(CheckpointConfigError) as caught:
        S3Config(url=url)
    assert caught.value.field == "checkpoint.store.url"
    assert "secret" not in str(caught.value)
