"""A worker sees the GPU that Ray has given it, also on clusters where Ray hides none."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT

PROGRAM = """
import os, ray
from elastic.ray_compat.cluster import see_own_gpus

ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)

@ray.remote(num_gpus=1)
class Worker:
    def look(self):
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        see_own_gpus()
        return f"{before}:{os.environ['CUDA_VISIBLE_DEVICES']}"

both = [Worker.remote() for _ in range(2)]
print("seen", *sorted(ray.get([worker.look.remote() for worker in both])))
"""


def test_each_sees_its_own() -> None:
    """Ray counts the GPUs that it is told of."""
    environment = {**os.environ, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "seen None:0 None:1" in done.stdout, done.stdout + done.stderr
