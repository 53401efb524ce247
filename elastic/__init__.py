"""ElasticTrainer: elastic, fault-tolerant training of large models on Ray.

The public names; everything else is an implementation detail. They load on first use, so that a
node agent, which imports this package too, carries neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpointing import CheckpointConfig, CheckpointConfigError, CheckpointError, S3Config
    from elastic.api import ElasticTrainer
    from elastic.config import HealthConfig, ScalingConfig
    from elastic.errors import ElasticError, ResourcesError, RunFailedError, RunStoppedError
    from elastic.node_config import Ec2Nodes, KubeNodes, LocalNodes, RayNodes
    from elastic.protocol.faults import Fault, parse_faults
    from elastic.reporting.callback import Callback
    from elastic.training_config import TrainingHealthConfig
    from trainer.config import OffloadConfig, OptimizerConfig, ParallelConfig, Steps, TrainConfig
    from trainer.data.config import DataConfig
    from trainer.errors import ConfigError, TrainerError
    from trainer.float8.config import Float8
    from trainer.models.hf import ModelConfig
    from trainer.tasks.causal_lm import CausalLM
    from trainer.tasks.custom import CustomTask
    from trainer.te.config import TransformerEngine

_HOMES = {
    "Callback": "elastic.reporting.callback",
    "CausalLM": "trainer.tasks.causal_lm",
    "CheckpointConfig": "checkpointing",
    "CheckpointConfigError": "checkpointing",
    "CheckpointError": "checkpointing",
    "ConfigError": "trainer.errors",
    "CustomTask": "trainer.tasks.custom",
    "DataConfig": "trainer.data.config",
    "Ec2Nodes": "elastic.node_config",
    "ElasticError": "elastic.errors",
    "ElasticTrainer": "elastic.api",
    "Fault": "elastic.protocol.faults",
    "Float8": "trainer.float8.config",
    "HealthConfig": "elastic.config",
    "KubeNodes": "elastic.node_config",
    "LocalNodes": "elastic.node_config",
    "ModelConfig": "trainer.models.hf",
    "OffloadConfig": "trainer.config",
    "OptimizerConfig": "trainer.config",
    "ParallelConfig": "trainer.config",
    "RayNodes": "elastic.node_config",
    "ResourcesError": "elastic.errors",
    "RunFailedError": "elastic.errors",
    "RunStoppedError": "elastic.errors",
    "S3Config": "checkpointing",
    "ScalingConfig": "elastic.config",
    "Steps": "trainer.config",
    "TrainConfig": "trainer.config",
    "TrainerError": "trainer.errors",
    "TrainingHealthConfig": "elastic.training_config",
    "TransformerEngine": "trainer.te.config",
    "parse_faults": "elastic.protocol.faults",
}

__all__ = [
    "Callback",
    "CausalLM",
    "CheckpointConfig",
    "CheckpointConfigError",
    "CheckpointError",
    "ConfigError",
    "CustomTask",
    "DataConfig",
    "Ec2Nodes",
    "ElasticError",
    "ElasticTrainer",
    "Fault",
    "Float8",
    "HealthConfig",
    "KubeNodes",
    "LocalNodes",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RayNodes",
    "ResourcesError",
    "RunFailedError",
    "RunStoppedError",
    "S3Config",
    "ScalingConfig",
    "Steps",
    "TrainConfig",
    "TrainerError",
    "TrainingHealthConfig",
    "TransformerEngine",
    "parse_faults",
]


def _refuse_shadowed_packages() -> None:
    """Raises ImportError where a file or folder of the user has the name of a package of this
    project, such as a `trainer.py` beside the script. Finds the packages, imports none of them."""
    ours = Path(__file__).resolve().parent.parent
    for package in ("trainer", "checkpointing", "health"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        found = Path(spec.origin).resolve()
        if found != ours / package / "__init__.py":
            other = found.parent if found.name == "__init__.py" else found
            raise ImportError(
                f"{other} hides ElasticTrainer's package {package!r} in {ours}: Python finds it "
                f"first. Rename {other.name}."
            )


_refuse_shadowed_packages()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
