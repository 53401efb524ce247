"""How `make docs` builds the manual: Sphinx with MyST, the custom of Ray, torchft and NVRx."""

project = "ElasticTrainer"
extensions = ["myst_parser"]
html_theme = "furo"
myst_heading_anchors = 3
# Links to files of the repository are checked by tests/unit/docs; Sphinx knows its own pages only.
suppress_warnings = ["myst.xref_missing"]
