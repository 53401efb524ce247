"""The error tree of the data plane: every error in it survives pickling and says what to do."""

from __future__ import annotations

import json
import os
import pickle

import pytest

from tests.support import ROOT
from trainer.data.index import TokensCorruptError
from trainer.errors import (
    CompileError,
    CompilerFailed,
    ConfigError,
    CrossGroupLost,
    DataStorageError,
    ExchangeError,
    GroupError,
    HealError,
    NetworkError,
    NonFiniteError,
    TrainerError,
    blame,
    describe,
)
from trainer.loop.samples import LedgerError

ALL: list[TrainerError] = [
    ConfigError("train.steps", 0, "must be at least 1", "Use 1 or more"),
    NonFiniteError(7, 3, (4, 5, 6)),
    CompileError("block model.layers.0", "it calls print"),
    CompilerFailed("block model.layers.0", "no space left on device"),
    DataStorageError(7, 60.4),
    NetworkError("p5.48xlarge", 32, ("NET/OFI No eligible providers were found",), "/r/w1.log"),
    CrossGroupLost("left for a regroup"),
    HealError("nothing came for 300 s"),
    GroupError("a peer did not come within 25 s"),
    ExchangeError("/models/llama", "it holds no weights", "Name a checkpoint of a model"),
    LedgerError(12, 3),
    TokensCorruptError("/data/00000.bin", "4 bytes, 8 expected"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_survives_pickling(error: TrainerError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert back.args == error.args
    assert vars(back) == vars(error)
    assert str(back) == str(error)


def test_all_of_the_tree_is_tried() -> None:
    tree = {cls for cls in TrainerError.__subclasses__() if cls.__module__.startswith("trainer.")}
    assert {type(error) for error in ALL} == tree


def test_a_config_error_names_field_value_fact_and_fix() -> None:
    error = ConfigError("train.precision", "fp8", "unknown", "Use 'float32' or 'bfloat16'")
    assert str(error) == "train.precision = 'fp8': unknown. Use 'float32' or 'bfloat16'."
    assert (error.field, error.value) == ("train.precision", "fp8")


def test_the_words_of_another_error_end_with_one_full_stop() -> None:
    reason = CompileError("block model.layers.0", "it calls print")
    error = ConfigError("train.compile", "require", f"a trial failed: {reason}", "Use 'off'")
    assert str(error).endswith("train.compile = 'off'. Use 'off'.")


def test_the_line_to_blame_is_the_users_last() -> None:
    """What it calls is not to blame; and a program may have a name that begins as ours do."""
    places = {
        "/home/me/train.py": ("train.py", 1),
        str(ROOT / "elastic_run.py"): ("elastic_run.py", 1),
        str(ROOT / "trainer" / "errors.py"): ("decoder.py", None),
    }
    for file, (name, line) in places.items():
        code = compile("json.loads('x')", file, "exec")
        with pytest.raises(ValueError, match="Expecting") as caught:
            exec(code, {"json": json})
        frame = caught.value.__traceback__
        assert frame is not None
        told = blame(caught.value.with_traceback(frame.tb_next))
        assert told.startswith("JSONDecodeError: Expecting value: line 1 column 1 (char 0) (line ")
        assert told.endswith(f"of {name})") and (line is None or f"(line {line} of" in told)


@pytest.mark.parametrize(("count", "shown"), [(2, "[0, 1]"), (16, "15]"), (17, "15, …]")])
def test_a_non_finite_error_shows_the_first_sixteen_samples(count: int, shown: str) -> None:
    text = str(NonFiniteError(41, 5, tuple(range(count))))
    assert shown in text
    assert ", 16" not in text
    assert "5 steps in a row up to step 41" in text
    assert "train.optimizer.lr" in text


def test_a_ledger_error_names_step_and_lane() -> None:
    assert "step 12, lane 3" in str(LedgerError(12, 3))


def test_what_is_said_of_an_error_can_be_written_anywhere() -> None:
    """Ray's `sys.stderr` raises at what is no UTF-8, as in the names of files: a worker that said
    so before it ended did not end."""
    name = os.fsdecode(b"caf\xe9.png")
    with pytest.raises(UnicodeEncodeError):
        name.encode()
    try:
        raise ValueError(f"cannot decode {name}")
    except ValueError as error:
        said = describe(error)
    assert said.encode().decode().endswith("ValueError: cannot decode caf\\udce9.png\n")
    assert describe(ConfigError(name, 0, "unknown", "Rename it")).startswith("caf\\udce9.png = 0")
