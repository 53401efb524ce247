"""The user's data settings, and that they load without the heavy libraries."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.data import DataConfig
from trainer.errors import ConfigError


def test_paths_become_a_tuple_of_strings() -> None:
    assert DataConfig(paths=["a", Path("b")]).paths == ("a", "b")  # type: ignore[arg-type]
    assert DataConfig(paths="corpus").paths == ("corpus",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("paths", ()),
        ("format", "csv"),
        ("vocab_size", 256),
        ("holdout", 1.0),
        ("holdout", -0.1),
        ("file_tokens", 0),
    ],
)
def test_a_value_that_cannot_work_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(**{"paths": ("a",), field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"train.task.data.{field}"
    assert caught.value.value == value
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_configuration_imports_no_heavy_library() -> None:
    code = (
        "import sys, trainer.data\n"
        "trainer.data.DataConfig(paths=('a',))\n"
        "heavy = {'torch', 'tokenizers', 'transformers', 'pyarrow', 'ray'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_loads() -> None:
    import trainer.data

    for name in trainer.data.__all__:
        assert getattr(trainer.data, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = trainer.data.no_such_name
