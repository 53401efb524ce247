"""One system's run of the goodput benchmark, in a process and a Ray cluster of its own.

    python -m benchmarks._goodput_run SYSTEM DIRECTORY STEPS STEP_S

SIGTERM ends both, whatever the run is at.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks._common import end_properly, ray_cluster
from benchmarks._runs import run_elastic, run_ray_train

WORKERS, SPARES = 4, 1


def main(system: str, directory: Path, steps: int, step_s: float) -> None:
    """Runs to the end, if it comes to that."""
    end_properly()
    with ray_cluster(WORKERS + SPARES):
        if system == "elastic":
            run_elastic(directory, workers=WORKERS, spares=SPARES, steps=steps, step_s=step_s)
        else:
            run_ray_train(directory, workers=WORKERS, steps=steps, step_s=step_s, max_failures=-1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
