from __future__ import annotations

import json
import subprocess
import sys


def test_no_damage_passes_for_sound() -> None:
    command = [sys.executable, "-m", "benchmarks.damage", "--cases", "60", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    found = [result[key] for key in ("cases", "wrong_tensors", "bare_errors", "undetected")]
    assert found == [60, 0, 0, 0]
    assert result["found_by_read"] > 30
    assert len(result["kinds"]) == 12
