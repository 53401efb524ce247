"""The names of a state's tensors, as in a checkpoint. Imports nothing."""

from __future__ import annotations

PARAMETERS = "param/"
"""What a parameter's name begins with; its moments' names begin with the moment's and a slash."""
