"""With which status a script ends that a run has failed in, as its parent sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from checkpointing import CheckpointConfigError
from elastic.errors import (
    ElasticError,
    ResourcesError,
    RunFailedError,
    RunGoesOnError,
    RunStoppedError,
)
from elastic.exit_status import decide_exit_status
from elastic.protocol.causes import known_causes
from tests.support import ROOT
from trainer.errors import ConfigError

USELESS = {"user_error", "device_assert"}
"""Told by hand: of all causes those that no other machine, no wait and no luck mends."""


@pytest.mark.parametrize("cause", [*known_causes(), "of_another_version"])
def test_a_run_is_not_to_be_started_again_for_what_needs_a_change(cause: str) -> None:
    status = decide_exit_status(RunFailedError("it failed", cause))
    assert status == (93 if cause in USELESS else 1)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("train.steps", 0, "a run needs a step", "Use 1 or more"), 93),
        (CheckpointConfigError("checkpoint.keep_last", 0, "nothing is kept", "Use 1"), 93),
        (RunStoppedError("/data/runs/llama", "stopped", 600), 93),
        (RunGoesOnError("run_config.name", "run", "run.lock is locked", "Wait for it"), 1),
        (RunFailedError("50 incidents took 50 workers"), 1),
        (ResourcesError("4 workers", "the cluster has 2 CPU", 60.0, "Add nodes"), 1),
        (ElasticError(), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_settings_that_cannot_work_and_a_stop_are_as_final(
    error: BaseException, status: int
) -> None:
    assert decide_exit_status(error) == status


def ended(code: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stderr


def test_a_script_with_a_setting_that_cannot_work_ends_with_93_and_shows_it() -> None:
    status, shown = ended("from elastic import *\nScalingConfig(max_replicas='two')")
    assert status == 93
    assert "Traceback" in shown and "scaling.max_replicas = 'two'" in shown
    assert "excepthook" not in shown


def test_a_script_with_another_error_ends_as_ever() -> None:
    status, shown = ended("from elastic import *\n1 / 0")
    assert status == 1 and "ZeroDivisionError" in shown


def test_an_interrupted_script_ends_as_a_shell_has_it_whatever_runs_after() -> None:
    """Python itself forgets the interrupt where `exec` is called then."""
    after = "import atexit\natexit.register(lambda: exec('pass'))\n"
    status, shown = ended(f"from elastic import *\n{after}raise KeyboardInterrupt")
    assert status == 130
    assert shown.endswith("\nKeyboardInterrupt\n") and "excepthook" not in shown


def test_a_hook_of_the_users_own_decides() -> None:
    own = "import sys\nsys.excepthook = lambda *_: sys.exit(7)\n"
    for code in (f"{own}from elastic import *", f"from elastic import *\n{own}"):
        assert ended(f"{code}\nraise KeyboardInterrupt") == (7, "")


def test_ctrl_c_does_not_end_a_shell_of_python() -> None:
    shell = "import code\nfrom elastic import *\ncode.interact(banner='', exitmsg='')"
    done = subprocess.run(
        [sys.executable, "-c", shell],
        input="raise KeyboardInterrupt\nprint('still', 'here')\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0 and "still here" in done.stdout, done.stderr


@pytest.mark.parametrize("first", ["import ray", "from elastic import *"])
def test_rays_own_hook_goes_with_it(first: str) -> None:
    code = f"{first}\nfrom elastic import *\nimport ray\nScalingConfig(max_replicas='two')"
    assert ended(code)[0] == 93
