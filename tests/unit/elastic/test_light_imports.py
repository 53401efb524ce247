"""What is imported before it is needed. By names: seconds depend on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT

HEAVY = ("torch", "ray", "ray.train", "matplotlib", "transformers", "pandas", "pyarrow")

CONFIGURATIONS = """
from elastic import *
train = TrainConfig(
    task=CausalLM(data=DataConfig(paths=("x",)), model=ModelConfig(), seq_len=8),
    steps=1, global_batch=1, optimizer=OptimizerConfig(), parallel=ParallelConfig(),
)
ScalingConfig(), HealthConfig(), CheckpointConfig(every_steps=5), parse_faults("kill@1")
CustomTask(build_model=dict, loss_function=dict, dataset=[0])
"""


def imported_after(code: str) -> set[str]:
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    return {name for name in HEAVY if name in told.stdout.split()}


@pytest.mark.parametrize(
    "code",
    [
        "import elastic",
        "from elastic import *",  # every public name, ElasticTrainer among them
        CONFIGURATIONS,
        "import elastic.cli.main",
    ],
)
def test_a_configuration_is_written_without_what_a_run_needs(code: str) -> None:
    assert imported_after(code) == set()


def test_a_trainer_is_made_with_rays_run_configuration_alone() -> None:
    code = f"{CONFIGURATIONS}\nElasticTrainer(train)"
    assert imported_after(code) & {"torch", "matplotlib", "transformers"} == set()


def test_the_supervisor_carries_neither_torch_nor_the_picture() -> None:
    code = "import elastic.supervisor.supervisor, trainer.tasks.causal_lm"
    assert imported_after(code) & {"torch", "matplotlib", "transformers"} == set()
