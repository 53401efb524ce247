"""One path for a directory, however the user wrote it: what belongs to it is found by that path."""

from __future__ import annotations

import os
from pathlib import Path


def named_directory(name: str | os.PathLike[str]) -> Path:
    """The absolute path of what a user has named, without `~` and `..`; a `file://` before it does
    not count. Links stay: other machines may have other ones there. A link with `..` after it is
    the exception, where the system would look beside the link's target.
    """
    path = Path(os.fspath(name).removeprefix("file://")).expanduser().absolute()
    found = Path("/")
    for part in path.parts[1:]:
        if part != "..":
            found /= part
        else:
            found = (found.resolve() if found.is_symlink() else found).parent
    return found
