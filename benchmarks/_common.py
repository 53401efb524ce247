"""What the benchmarks share: progress, the last line, scratch directories, Ray clusters."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_START_S = time.monotonic()


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - _START_S:6.1f} s] {text}", file=sys.stderr, flush=True)


def end_properly() -> None:
    """Makes SIGTERM an exception, so that what was started is ended."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def limit_link(module: str, rate: str) -> NoReturn:
    """Starts a benchmark anew in a network namespace whose loopback has a rate, such as 4gbit.

    Needs root, tc and unshare. The benchmark gets its arguments but for `--link`.
    """
    script = (
        f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 2mb latency 200ms"
        ' && exec "$@"'
    )
    arguments = [word for word in sys.argv[1:] if word not in ("--link", rate, f"--link={rate}")]
    again = [sys.executable, "-m", module, *arguments]
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", script, "sh", *again])


def show_table(title: str, rows: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Prints rows of numbers by name; None is a row that could not be measured."""
    columns = list(dict.fromkeys(key for row in rows.values() if row for key in row))
    lines = [["", *columns]]
    for name, row in rows.items():
        lines.append([name, *(_cell(row.get(key) if row else None) for key in columns)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    print(f"\n{title}", file=sys.stderr)
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]), file=sys.stderr)
    print(file=sys.stderr, flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def plan_turns(names: list[str], rounds: int) -> list[list[str]]:
    """The order in each round: another one begins, so that nobody has always the same before it."""
    return [names[turn % len(names) :] + names[: turn % len(names)] for turn in range(rounds)]


def print_result(result: Mapping[str, Any]) -> None:
    """The last line of every benchmark."""
    sys.stderr.flush()
    print(json.dumps(result), flush=True)


def median_of(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number over the runs."""
    return {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A directory that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix=f"bench_{name}_"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster(cpus: int) -> Iterator[None]:
    """A Ray cluster of this process, with its own directory; both are gone afterwards."""
    import ray

    # Short, because Ray puts sockets below it, and a socket's path has 107 characters at most.
    directory = tempfile.mkdtemp(prefix="rb_", dir=os.environ.get("RAY_TMPDIR", "/tmp"))
    try:
        ray.init(
            "local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200 * 2**20,
            _temp_dir=directory,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
