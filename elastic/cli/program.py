"""The trainer in a user's program, which is read and not run."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import ModuleType
from typing import TYPE_CHECKING

from checkpointing import CheckpointError
from elastic.errors import ElasticError
from trainer.errors import ConfigError, TrainerError, blame

if TYPE_CHECKING:
    from elastic.api import ElasticTrainer

_MODULE = "__mp_main__"
"""What multiprocessing calls a main program that is imported, not run."""

_MAKE_ONE = "Make one there, such as `trainer = ElasticTrainer(...)`, that NAME can name"

READ = """\
FILE.py is imported, not run: what stands below `if __name__ == "__main__":` is not done, and it
ends where it calls `fit`, which starts nothing. All else outside functions is done, `ray.init()`
too. It gets no arguments of its own, and what it prints goes to standard error. NAME is an
ElasticTrainer in it, made outside functions, unlike that of examples/quickstart.py; it may be left
out where there is only one."""
"""For the help of a command that takes FILE.py[:NAME]."""


def add_program_to(verb: argparse.ArgumentParser) -> None:
    """Adds what `find_trainer` takes, as `file`."""
    verb.add_argument("file", metavar="FILE.py[:NAME]", help="where the ElasticTrainer is")


def find_trainer(where: str) -> ElasticTrainer:
    """Imports FILE.py, up to its first `fit`, and takes the trainer NAME of it.

    Raises:
        ConfigError: there is no such file, it raises, or there is no such trainer in it; the
            message says which there are.
    """
    from elastic.api import ElasticTrainer

    file, _, name = where.partition(":")
    module = _import(Path(file))
    there = {key: value for key, value in vars(module).items() if isinstance(value, ElasticTrainer)}
    known = f"it has {', '.join(there)}" if there else "it has none outside functions"
    if name:
        if name not in there:
            fix = "Name one" if there else _MAKE_ONE
            raise ConfigError("NAME", name, f"no ElasticTrainer in {file}: {known}", fix)
        return there[name]
    different = {id(value): value for value in there.values()}
    if not different:
        raise ConfigError("FILE", file, f"no ElasticTrainer in it: {known}", _MAKE_ONE)
    if len(different) > 1:
        raise ConfigError("FILE", file, f"not one ElasticTrainer: {known}", "Use FILE.py:NAME")
    return next(iter(different.values()))


@contextmanager
def bad_input(where: str, what: str, fix: str = "Mend the file") -> Iterator[None]:
    """What the code of a program raises in this block is bad input; what it prints goes to standard
    error, as the result alone goes to standard output.

    Args:
        where: FILE.py[:NAME].
        what: is done there.
        fix: what to do about it.

    Raises:
        ConfigError: it raised. Our own errors stay as they are.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (CheckpointError, ElasticError, TrainerError):
        raise
    except Exception as error:
        raise ConfigError("FILE", where, f"{what} raised {blame(error)}", fix) from error


def _import(file: Path) -> ModuleType:
    from elastic.api import FitReached, reading_only

    if not file.is_file():
        fact = "a directory" if file.is_dir() else "no such file"
        raise ConfigError("FILE", str(file), fact, "Name a Python file")
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    if spec is None or spec.loader is None:
        raise ConfigError("FILE", str(file), "not a Python file", "Name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE.py` does
    sys.modules[_MODULE] = module
    try:
        with reading_only(), _as_main(file):
            spec.loader.exec_module(module)
    except FitReached:
        pass
    except (CheckpointError, ElasticError, TrainerError):
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if _is(file, frame)]
        line = f" in line {lines[-1]}" if lines else ""
        fact = f"its import ends{line} with {type(error).__name__}: {error}"
        raise ConfigError("FILE", str(file), fact, "Mend the file") from error
    return module


@contextmanager
def _as_main(file: Path) -> Iterator[None]:
    """A program in this block sees `python FILE.py`, not this command, and leaves its output be."""
    ours, sys.argv = sys.argv, [str(file)]
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = ours


def _is(file: Path, frame: FrameSummary) -> bool:
    return Path(frame.filename) == file.absolute()
