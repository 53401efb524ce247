"""How `make docs` builds the manual: Sphinx with MyST, the custom of Ray, torchft and NVRx."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from fields import insert_tables

project = "ElasticTrainer"
extensions = ["myst_parser"]
html_theme = "furo"
myst_heading_anchors = 3
# Links to files of the repository are checked by tests/unit/docs; Sphinx knows its own pages only.
suppress_warnings = ["myst.xref_missing"]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", lambda _app, _name, text: text.insert(0, insert_tables(text.pop())))
