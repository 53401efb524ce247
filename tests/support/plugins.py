"""Packages with entry points, as pip would leave them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install_plugin(
    folder: Path, module: str, source: str, groups: Mapping[str, Mapping[str, str]]
) -> None:
    """Installs a module into `folder`, which is to be on the path of a new process.

    Args:
        folder: where to.
        module: its name.
        source: its text.
        groups: group of entry points -> name -> what it loads, such as "module:object".
    """
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
