"""torchft for the benchmarks, in a directory of its own: it is a peer, not a dependency."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.2.0"
_NEEDS = ("opentelemetry-sdk>=1.39", "opentelemetry-exporter-otlp-proto-http>=1.39")


def find_torchft() -> Path:
    """The directory to put on PYTHONPATH; installs torchft there the first time, without torch.

    Raises:
        RuntimeError: it cannot be installed or does not work with this torch.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    place = cache / "elastictrainer" / f"torchft-{VERSION}"
    if not (place / ".complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--target", str(place)]
        _run([*pip, "--no-deps", f"torchft=={VERSION}"])
        _run([*pip, *_NEEDS])
        (place / ".complete").touch()
    environment = {**os.environ, "PYTHONPATH": str(place)}
    _run([sys.executable, "-c", "from torchft import Manager, ProcessGroupGloo"], environment)
    return place


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(command[1:5])} ... failed: {last}")
