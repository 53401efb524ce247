"""Tables of the settings, made of the dataclasses when the site is built: none can be out of date.

A page asks for the table of a class by a line `<!-- fields: elastic.config.HealthConfig -->`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_WANTED = re.compile(r"^<!-- fields: ([\w.]+)\.(\w+) -->$", re.MULTILINE)


def insert_tables(page: str) -> str:
    """The text of a page, with a table in each place that asks for one."""
    return _WANTED.sub(lambda found: table(found[1], found[2]), page)


def table(module: str, name: str) -> str:
    """The fields of a dataclass: name, type, default, and the text below the field.

    Raises:
        ValueError: there is no such class, or a field has no text.
    """
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    classes = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    if not classes:
        raise ValueError(f"{file} has no class {name}")
    body = classes[0].body
    rows = [
        _row(name, field, after)
        for field, after in zip(body, [*body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
    ]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])


def _row(owner: str, field: ast.AnnAssign, after: ast.stmt | None) -> str:
    name = ast.unparse(field.target)
    text = getattr(getattr(after, "value", None), "value", None)
    if not isinstance(text, str):
        raise ValueError(f"{owner}.{name} has no text below it")
    default = "required" if field.value is None else f"`{ast.unparse(field.value)}`"
    cells = (f"`{name}`", f"`{ast.unparse(field.annotation)}`", default, " ".join(text.split()))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
