"""A file that a docstring or a page of the manual names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

FOLDERS = ("elastic", "trainer", "checkpointing", "health", "benchmarks", "examples", "tests")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
OTHERS = {"FILE.py", "train.py", "train_ddp.py", "ddp.py", "filesystem.py"}
"""A user's, torchft's and torch's."""


def named(text: str) -> set[str]:
    """The Python files that `text` names, alone or by a path from one of our folders."""
    names = (name.lstrip("./") for name in re.findall(r"[\w./-]*\w\.py\b", text))
    return {n for n in names if "/" not in n or n.partition("/")[0] in FOLDERS} - OTHERS


def docstrings(source: str) -> Iterator[str]:
    """The strings that stand alone: docstrings, and those of fields and constants."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def absent(texts: dict[Path, str]) -> set[tuple[str, str]]:
    """(file, name in it) where no file of the tree has the name."""
    there = {"/" + path.relative_to(ROOT).as_posix() for path in SOURCES}
    return {
        (path.relative_to(ROOT).as_posix(), name)
        for path, text in texts.items()
        for name in named(text)
        if not any(file.endswith(f"/{name}") for file in there)
    }


def test_the_check_sees_names() -> None:
    text = "`gone.py`, ../tests/gone/too.py, (machine.py); not torch/distributed/other.py"
    assert named(text) == {"gone.py", "tests/gone/too.py", "machine.py"}
    assert absent({ROOT / "page": text}) == {("page", "gone.py"), ("page", "tests/gone/too.py")}


def test_docstrings_name_files_that_are_there() -> None:
    texts = {path: "\n".join(docstrings(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert absent(texts) == set()


def test_the_manual_names_files_that_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert absent({page: page.read_text(encoding="utf-8") for page in pages}) == set()
