"""Programs with a bound: what each has printed as JSON, or why it has not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_AS_PROGRAM = (
    "import sys; home, path = sys.argv.pop(1), [*filter(None, sys.path)]; "
    "at = [n for n, entry in enumerate(path) if entry.endswith('-packages')] or [len(path)]; "
    "sys.path = path if home in path else [*path[: at[0]], home, *path[at[0] :]]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""As `python -m`, which looks for all modules in the working directory first, where there may be
anybody's files. Takes the folder that this package lies in, and the module. That folder comes
before what is installed (site-packages, Debian's dist-packages): there may be another version of
this package."""
_HOME = str(Path(__file__).parents[2])

_LOOK_S = 0.02
_END_S = 1.0
"""How long to wait for the end of one that was killed. One that is stuck in the kernel stays."""
_MOST_WORDS = 300
"""Characters of what a program says that went wrong."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A module that is run as a program."""

    module: str
    """Its name."""
    arguments: tuple[str, ...] = ()
    """Of its command line."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, beside this process's own."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a program."""

    found: Mapping[str, Any]
    """The last result that it printed, also where it failed after that; empty where none came."""
    trouble: str = ""
    """Why it did not end well with a result; empty where it did."""
    late: bool = False
    """It was not done in time."""


def run_programs(programs: Sequence[Program], bound_s: float) -> list[Outcome]:
    """Runs programs beside each other, for `bound_s` at most; then those that are left are killed
    with all that they have started."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        files = [Path(folder) / str(number) for number in range(len(programs))]
        running = [_start(one, file) for one, file in zip(programs, files, strict=True)]
        try:
            end = time.monotonic() + bound_s
            while any(one.poll() is None for one in running) and time.monotonic() < end:
                time.sleep(_LOOK_S)
            codes = [one.poll() for one in running]
        finally:
            for one in running:
                _end(one)
        return [_outcome(*each, bound_s) for each in zip(programs, files, codes, strict=True)]


def _start(program: Program, file: Path) -> subprocess.Popen[bytes]:
    with file.open("wb") as out, _errors_of(file).open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", _AS_PROGRAM, _HOME, program.module, *program.arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=_environment(program),
            start_new_session=True,
        )


def _environment(program: Program) -> dict[str, str]:
    """Without the empty parts of PYTHONPATH, as `$PYTHONPATH:/x` has where it was not set: they are
    the working directory."""
    found = {**os.environ, **program.variables}
    parts = filter(None, found.get("PYTHONPATH", "").split(os.pathsep))
    return {**found, "PYTHONPATH": os.pathsep.join(parts)}


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)


def _errors_of(file: Path) -> Path:
    """Where a program's stderr goes, apart from its stdout: libraries warn at any time."""
    return file.with_suffix(".errors")


def _outcome(program: Program, file: Path, code: int | None, bound_s: float) -> Outcome:
    lines, errors = _lines(file), _lines(_errors_of(file))
    found = next(filter(None, map(_result, reversed(lines))), {})
    if code is None:
        return Outcome(found=found, trouble=f"no answer in {bound_s:g} s", late=True)
    if code == 0 and found:
        return Outcome(found=found)
    said = (errors or lines or [""])[-1].strip()[:_MOST_WORDS]
    return Outcome(found=found, trouble=said or f"{program.module} ended with status {code}")


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").strip().splitlines()


def _result(line: str) -> dict[str, Any]:
    """The result that a line tells; empty where it tells none: libraries log there, too, some of
    them JSON."""
    with contextlib.suppress(ValueError):
        said = json.loads(line)
        if isinstance(said, dict) and isinstance(result := said.get("result"), dict):
            return result
    return {}
