"""The driver of a run of the soak on hosts.

    python benchmarks/_chaos_driver.py ADDRESS OUT SEED LAYOUTS plain|featured TEXT STORAGE

LAYOUTS may be empty: those that are drawn by default. Writes to OUT what was left behind and the
outcome.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import ray

from benchmarks._chaos import draw_schedule, parse_layouts
from benchmarks._chaos_left import find_left_behind
from benchmarks._chaos_trainer import make_trainer
from tests.support.hosts import OWN_IP
from tests.support.tiny import fit

if __name__ == "__main__":
    address, out, seed, layouts, kind, text, storage = sys.argv[1:]
    ray.init(address=address, log_to_driver=False, _node_ip_address=os.environ[OWN_IP])
    schedule = draw_schedule(int(seed), parse_layouts(layouts), resize=True, plain=kind == "plain")
    outcome = fit(make_trainer(schedule, Path(text), Path(storage)))
    left = find_left_behind(Path(storage) / schedule.name)
    Path(out).write_text(json.dumps([left, asdict(outcome)]), encoding="utf-8")
