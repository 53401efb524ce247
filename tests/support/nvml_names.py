"""Records what NVIDIA's package of NVML has of the names that we ask it for, from its wheel
(`pip download --no-deps nvidia-ml-py==13.615.71`):
`python -m tests.support.nvml_names WHEEL > tests/unit/health/nvml_names.json`.

Only these names, the parameters of functions and the values of numbers are kept. The package is
imported from the wheel, which loads no driver.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.support import ROOT

_ASKING = ("health/gpu.py", "health/xid_events.py", "elastic/doctor/gpu_checks.py")
"""All that ask."""

_NAME = re.compile(r'(?:nvml\.|")(nvml\w+|NVML\w+)')
"""A name asked of a variable that ends in nvml, or kept as a string to be asked so."""


def names_asked() -> set[str]:
    """What our code asks NVML's package for."""
    return {name for file in _ASKING for name in _NAME.findall((ROOT / file).read_text())}


def main() -> None:
    """Prints them as JSON: a function's parameters, those without a default; a number; null for a
    class. What the package lacks is left out."""
    wheel = Path(sys.argv[1])
    sys.path.insert(0, str(wheel))
    nvml = importlib.import_module("pynvml")
    found: dict[str, Any] = {}
    for name in sorted(names_asked() & set(dir(nvml))):
        value = getattr(nvml, name)
        if inspect.isfunction(value):
            given = inspect.signature(value).parameters.values()
            found[name] = [one.name for one in given if one.default is one.empty]
        else:
            found[name] = None if inspect.isclass(value) else value
    note = (
        "Names of nvidia-ml-py (Copyright (c) 2011-2025, NVIDIA Corporation; BSD license), read by "
        "tests/support/nvml_names.py; no code of it."
    )
    print(json.dumps({"note": note, "version": wheel.name.split("-")[1], "names": found}, indent=1))


if __name__ == "__main__":
    main()
